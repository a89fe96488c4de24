"""The real V1 trainer with demonstrations: the actor's log-probs replace the missing ones."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.replay.transcripts import write
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.exchange import seed_pool
from trainer_hooks.replay.message_rows import MessageTokenizer, load_tokenizer
from trajstore.interop.convert import convert_from

from .assets import TRAIN_ROWS, Assets, make_rows
from .runs import GROUP, REPLAY, Train, log_probs_of
from .witness import LossRow

pytestmark = [pytest.mark.timeout(900), pytest.mark.campaign]


@pytest.mark.parametrize("longest", [16, 3])
def test_a_run_that_begins_with_demonstrations(longest: int, train: Train, verl_assets: Assets, tmp_path: Path) -> None:
    lines = []
    for task in make_rows(0, TRAIN_ROWS, "train"):
        answer = task["reward_model"]["ground_truth"] * 3
        messages = [*task["prompt"], {"role": "assistant", "content": answer}]
        lines.append({"task_id": f"digit:{task['extra_info']['index']}", "messages": messages, "reward": 1.0})
    source = write(tmp_path / "demos.jsonl", *lines)
    limits = (f"data.max_response_length={longest}", "trainer.total_training_steps=2")
    pool = tmp_path / "checkpoints" / "trajstore" / "rollouts"
    pool.parent.mkdir(parents=True)
    convert_from(source, tmp_path / "demos", "chat")
    tokenizer = MessageTokenizer.of(load_tokenizer(str(verl_assets.model)))
    assert seed_pool(pool, tmp_path / "demos", PoolRules(n_rollout=GROUP), tokenizer=tokenizer).entered == TRAIN_ROWS
    store = BufferStore.open(pool)
    held = ExperienceManager(PoolRules(n_rollout=GROUP), store=store).task2trajectories
    store.close()
    demonstrations = {tuple(rollout.input_ids.tolist()) for several in held.values() for rollout in several}  # type: ignore[union-attr]

    done = train(tmp_path, *REPLAY, *limits)
    records, rows = done.steps, done.rows
    if longest == 3:  # answers are three digits and an end token
        assert [record["experience_replay/too_long"] for record in records] == [TRAIN_ROWS, TRAIN_ROWS]
        assert not any(row.tokens in demonstrations for row in rows)
        assert {row.response.numel() <= longest for row in rows} == {True}
        return
    assert [record["experience_replay/demonstration_rows"] for record in records] == [2.0, 2.0]
    assert records[0]["experience_replay/off_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert "experience_replay/recorded_difference_mean" not in records[0], "nothing was recorded"
    groups: dict[str, list[LossRow]] = defaultdict(list)
    for row in rows:
        if row.response_mask.any():  # otherwise verl's padding row
            groups[row.uid].append(row)
    replayed = [row for held in groups.values() for row in held if row.exp_mask.any()]
    assert len(replayed) == 4
    first = replayed[: len(replayed) // 2]  # the first step, with the initial weights
    for row in replayed:
        assert row.tokens in demonstrations
        assert row.old_log_probs.isfinite().all()
        assert torch.equal(row.exp_mask[: row.response.numel()], row.response_mask)
        written = row.response_mask.bool()
        if any(row is rollout for rollout in first):
            wanted = log_probs_of(verl_assets.model, row)
            torch.testing.assert_close(row.old_log_probs[written], wanted[written], atol=1e-4, rtol=1e-4)
        assert (row.advantages[written] >= 0).all(), "its score is that of a success"
    assert {len(held) for held in groups.values()} == {GROUP}
