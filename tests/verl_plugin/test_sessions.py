"""The real V1 trainer on agent sessions with branches: advantages, weights and loss are those of a recount."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from trainer_hooks.steps import recompute, step_inputs
from trajstore.ledger import read

from .rebuilt import store_of
from .recount import DUAL_CLIP, HIGH, LOW, check_loss_rows
from .runs import GROUP, PROMPTS, REPLAY, Train


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("token-mean", marks=pytest.mark.campaign),
        "seq-mean-token-mean",
        pytest.param("seq-mean-token-sum", marks=pytest.mark.campaign),
    ],
)
def test_a_step_on_sessions_is_that_of_a_recount(train: Train, tmp_path: Path, mode: str) -> None:
    loop = tmp_path / "loop.yaml"
    loop.write_text("- name: branches\n  _target_: trajstore_verl_cpu_branches.Branches\n", encoding="utf-8")
    done = train(
        tmp_path,
        *REPLAY,
        "+exp_manager.experience_replay.exp_ratio=1.0",
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=branches",
        "trainer.total_training_steps=2",
    )
    rollouts = {rollout.rollout_id: rollout for rollout in done.rollouts}
    if mode == "token-mean":
        assert check_loss_rows(done.rows, done.rollouts, group=lambda task: GROUP).replayed_of_several > 0
    branched = [rollout for rollout in rollouts.values() if "rows" in rollout.metadata]
    assert 0 < len(branched) < len(rollouts)
    for rollout in branched:
        rows = rollout.metadata["rows"]
        assert [row["session"]["path"] for row in rows] == [0, 1]
        assert rows[0]["session"]["id"] == rows[1]["session"]["id"]
        assert [[call["id"] for call in row["session"]["calls"]] for row in rows] == [["0", "1"], ["0", "2"]]
        first, second = (row["tokens"] - row["prompt"] for row in rows)
        begun = rows[0]["session"]["calls"][0]
        shared = begun["stop"] - begun["start"]
        mask = rollout.response_mask.tolist()
        assert mask[:shared] == [1] * shared
        assert mask[-second : len(mask) - second + shared] == [0] * shared, "the shared answer is trained once"
        assert mask[first - 1] == mask[-1] == 1

    seen = [row for row in done.rows if row.response_mask.any()]
    sizes = []
    for step in read(store_of(tmp_path) / "ledger").steps.values():
        session_of: dict[int, int] = defaultdict(int)
        for trajectory, tokens in zip(step.rows["trajectory"].tolist(), step.rows["tokens"].tolist(), strict=True):
            session_of[trajectory] += tokens
        report = recompute(step_inputs(store_of(tmp_path), step.step))
        assert not report.problems
        assert len(session_of) == GROUP * PROMPTS, "groups have as many sessions as asked for"
        for row in step.rows:
            share = row["tokens"] / session_of[int(row["trajectory"])] if mode == "seq-mean-token-mean" else 1.0
            assert row["weight"] == pytest.approx(share, abs=1e-6)
            sizes.append(share)
    assert (mode != "seq-mean-token-mean") == (set(sizes) == {1.0})

    # A token's weight in its session: the loss of a micro-batch is the sum over its rows.
    tokens_of: dict[tuple[str, int], int] = defaultdict(int)
    for row in seen:
        tokens_of[row.uid, row.session] += int(row.response_mask.sum())
    totals: dict[object, float] = defaultdict(float)
    for row in seen:
        total = 0.0
        columns = (row.log_probs, row.old_log_probs, row.advantages, row.response_mask, row.exp_mask)
        for new, old, advantage, counts, off in zip(*(column.tolist() for column in columns), strict=False):
            ratio = math.exp(new - old)
            high = 1.0 if off else HIGH
            ratio = min(ratio, 1 + high) if advantage >= 0 else min(max(ratio, 1 - LOW), DUAL_CLIP)
            total -= counts * advantage * ratio
        weight = {
            "token-mean": 1 / row.micro_batch.batch_tokens,
            "seq-mean-token-sum": 1 / (GROUP * PROMPTS),
            "seq-mean-token-mean": 1 / (GROUP * PROMPTS * tokens_of[row.uid, row.session]),
        }[mode]
        totals[row.micro_batch] += weight * total
    for micro_batch, wanted in totals.items():
        assert micro_batch.loss == pytest.approx(wanted, rel=1e-3, abs=1e-5)  # type: ignore[attr-defined]
