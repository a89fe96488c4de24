"""The real V1 trainer with an agent loop of several outputs per session: replayed whole, groups count rollouts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from trajstore import AgentTrajectory
from trajstore.experience.rows import row_count, rows_of

from .assets import Assets
from .harness import VerlSession, make_config
from .runs import GROUP, REPLAY, recorded
from .witness import LossRow, Witness

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 5


def test_sessions_of_several_outputs_are_replayed_whole(
    verl_session: VerlSession, verl_assets: Assets, witness: Witness, tmp_path: Path
) -> None:
    loop = tmp_path / "loop.yaml"
    loop.write_text("- name: two_outputs\n  _target_: trajstore_verl_cpu_outputs.TwoOutputs\n", encoding="utf-8")
    witness.take()
    overrides = (
        *REPLAY,
        "+exp_manager.experience_replay.offpolicy_trajectories_per_task=2",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=two_outputs",
        f"trainer.total_training_steps={STEPS}",
    )
    run = verl_session.run(make_config(verl_assets, tmp_path, overrides))
    records = [record for record in run.metrics if "training/global_step" in record]
    rollouts = recorded(tmp_path)
    assert {row_count(one) for one in rollouts} == {1, 2}
    assert all(one.metadata["outputs"] == row_count(one) for one in rollouts)
    assert len(rollouts) == sum(record["recording/rollouts"] for record in records)

    parts: dict[tuple[int, ...], list[tuple[AgentTrajectory, AgentTrajectory]]] = defaultdict(list)
    for one in rollouts:
        for part in rows_of(one):
            assert part.input_ids is not None
            parts[tuple(part.input_ids.tolist())].append((part, one))
    groups: dict[str, list[tuple[LossRow, AgentTrajectory, bool]]] = defaultdict(list)
    for row in witness.take():
        if not row.response_mask.any():
            continue  # by which verl fills the batch up
        found = [
            (part, one)
            for part, one in parts[row.tokens]
            if part.old_log_probs is not None and torch.equal(part.old_log_probs, row.old_log_probs)
        ]
        assert found, "the loss compares with the log-probs that are recorded"
        own = [one for _, one in found if one.metadata["uid"] == row.uid]
        groups[row.uid].append((row, own[0] if own else found[0][1], not own))
    several = 0
    for held in groups.values():
        sessions = {one.rollout_id: one for _, one, _ in held}
        assert len(sessions) == GROUP, "a group counts rollouts, not rows"
        assert len(held) == sum(map(row_count, sessions.values())), "each of them is whole"
        scores = {name: one.reward.metadata["score"] for name, one in sessions.items() if one.reward is not None}
        values = torch.tensor(list(scores.values()))
        for row, one, replayed in held:
            several += replayed and row_count(one) == 2
            wanted = (scores[one.rollout_id] - values.mean()) / (values.std() + 1e-6) * row.response_mask
            torch.testing.assert_close(row.advantages, wanted, atol=1e-4, rtol=1e-4)
            mask = row.exp_mask[: row.response.numel()]
            assert torch.equal(mask, row.response_mask if replayed else torch.zeros_like(mask))
    assert several >= 2, "rollouts of two rows were replayed"
    replayed_rows = sum(replayed for held in groups.values() for _, _, replayed in held)
    assert replayed_rows == sum(record["experience_replay/replayed_rows"] for record in records)
