"""The real V1 trainer with AgentEvolver's pools: replayed rows equal those of AgentEvolver's code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.replay.foreign_pools import KnownRollout, of_conversations, of_messages
from tests.replay.test_message_rows import HINT, without_ids
from trainer_hooks.replay.persistence import read_pool, write_pool
from trajstore import AgentTrajectory, Reward
from trajstore.cli import main

from .assets import make_assets
from .recount import check_loss_rows
from .runs import GROUP, Train, log_probs_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.campaign]

SOURCE = "house"
OPTION = "+exp_manager.experience_replay."


def history(one: KnownRollout) -> AgentTrajectory:
    """Return a rollout with rows and prompt in the format of a recorded session of several outputs."""
    ids = [token for row in one.rows for token in row.ids]
    mask = [on for row in one.rows for on in row.mask]
    first = one.rows[0].start
    log_probs: list[float] = []
    for row in one.rows:
        log_probs += [0.0] * row.start + (row.log_probs or [])
    recorded_ones = None if one.rows[0].log_probs is None else torch.tensor(log_probs[first:])
    return AgentTrajectory(
        task_id=f"{SOURCE}:{one.task}",
        rollout_id=f"{one.task}/{one.rollout}",
        messages=one.asked,
        input_ids=torch.tensor(ids),
        response_start=first,
        response_mask=torch.tensor(mask[first:]),
        old_log_probs=recorded_ones,
        reward=Reward(outcome=1.0, metadata={"score": 1.0}),
        metadata={
            "uid": "",
            "demonstration": recorded_ones is None,
            "rows": [{"tokens": len(row.ids), "prompt": row.start} for row in one.rows],
        },
    )


@pytest.mark.parametrize("kind", ["linear", "linear_think", "messages"])
def test_the_rows_of_agentevolver_are_trained_on(
    kind: str, train: Train, shared_fixtures: Path, tmp_path: Path
) -> None:
    """Every second history lacks token ids and is tokenized again. One task's histories have several prompts in
    these pools; those whose prompt is not in the data are left out."""
    from transformers import AutoTokenizer

    base = shared_fixtures / "experience_pool_cmt"
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    source = tmp_path / "experience_pool" / "step_40"
    if kind == "messages":
        source = shared_fixtures / "experience_pool" / "step_120"
        histories = [history(known) for known in of_messages(source, tokenizer)]
    else:
        histories = [history(known) for known in of_conversations(base / kind)]
        pool = read_pool(base / kind / "step_40")
        for held in pool.task2trajectories.values():
            held[::2] = [without_ids(known) for known in held[::2]]
        write_pool(source, pool)
    rows = [
        {
            "data_source": SOURCE,
            "prompt": known.messages,
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": "said by no random model"},
            "extra_info": {"index": known.task_id.partition(":")[2], "split": "train"},
        }
        for known in {known.task_id: known for known in histories}.values()
    ]
    assets = make_assets(tmp_path / "assets", tokenizer=tokenizer, rows=rows)
    words = ["--tokenizer", str(assets.model), "--task-prefix", f"{SOURCE}:"]
    words += ["--context", "linear_think", "--think-hint", HINT] if kind == "linear_think" else []
    assert main(["pool", "seed", str(tmp_path / "checkpoints" / "trajstore" / "rollouts"), str(source), *words]) == 0

    overrides = [
        "trainer.v1.trainer_mode=sync_replay",
        "+exp_manager.experience_replay.enable=true",
        f"{OPTION}exp_ratio=1.0",
        f"{OPTION}in_turns=true",  # so that every history is drawn
        f"data.train_batch_size={len(rows)}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(rows)}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={GROUP * len(rows)}",  # one for each mini-batch
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={2 * len(rows)}",
        "data.max_prompt_length=256",
        f"data.max_response_length={80 if kind == 'linear_think' else 300}",
        "trainer.total_training_steps=4",
    ]
    if kind == "linear_think":  # otherwise multi-row histories do not fit beside single-row rollouts
        loop = tmp_path / "loop.yaml"
        loop.write_text("- name: two_outputs\n  _target_: trajstore_verl_cpu_outputs.TwoOutputs\n", encoding="utf-8")
        overrides += [
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_outputs",
        ]
    done = train(tmp_path, *overrides, assets=assets)
    records, seen = done.steps, done.rows
    assert len(records) == 4
    prompts = {row["extra_info"]["index"]: row["prompt"] for row in rows}
    fitting = [known for known in histories if known.messages == prompts[known.task_id.partition(":")[2]]]
    made = [rollout for rollout in done.rollouts if "uid" in rollout.metadata]  # without those that were seeded
    counted = check_loss_rows(seen, [*made, *fitting], group=lambda task: GROUP)
    replayed = [row for row in seen if row.exp_mask.any()]
    assert counted.replayed_rows == len(replayed)
    assert len(replayed) == done.sum_of("replayed_rows")
    assert {row.tokens for row in replayed} == set().union(*map(tokens_of_rows, fitting))
    others = {
        (known.task_id, *tokens_of_rows(known)) for known in histories if not any(known is kept for kept in fitting)
    }
    assert [record["experience_replay/other_prompts"] for record in records] == [len(others)] * len(records)
    if kind == "messages":  # these tokens have no recorded log-probs; the first step uses the initial weights
        for row in replayed[: int(records[0]["experience_replay/replayed_rows"])]:
            written = row.response_mask.bool()
            wanted = log_probs_of(assets.model, row)
            torch.testing.assert_close(row.old_log_probs[written], wanted[written], atol=1e-4, rtol=1e-4)


def tokens_of_rows(history: AgentTrajectory) -> list[tuple[int, ...]]:
    """Return the tokens of a history's rows."""
    lengths = [part["tokens"] for part in history.metadata["rows"]]
    return [tuple(part.tolist()) for part in history.input_ids.split(lengths)]
