"""Rollouts have exactly the sampled ids, masks and log-probs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from examples.grpo.config import TrainerConfig
from examples.grpo.model import response_log_probs
from examples.grpo.rollout import turns_as_rows
from examples.grpo.trainer import ReferenceTrainer
from tests.examples.runs import HOUSEHOLD, SORT, Train, environment, replay
from tests.replay.conftest import row
from trainer_hooks.batch import Batch
from trainer_hooks.replay.rows import row_count, rows_of
from trajstore.trajectory import AgentTrajectory

CONFIGS = [SORT, HOUSEHOLD]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.environment)
def test_log_probs_of_the_draw_equal_those_of_one_row_alone(make: Train, config: TrainerConfig) -> None:
    """Despite other rows' lengths, gaps and the cache, each row equals its plain forward pass."""
    trainer = make(config)
    tasks = [task for task in trainer.environment.tasks for _ in range(3)]
    lengths = set()
    for trajectory in trainer.worker.run(tasks, torch.Generator().manual_seed(1)):
        ids = trajectory.input_ids[None]
        lengths.add(ids.shape[1])
        response = ids.shape[1] - (trajectory.response_start or 0)
        with torch.no_grad():
            log_probs, _ = response_log_probs(
                trainer.model, ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], response
            )
        written = trajectory.response_mask.bool()
        torch.testing.assert_close(trajectory.old_log_probs[written], log_probs[0][written], atol=1e-5, rtol=0)
    assert len(lengths) > 1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.environment)
def test_masks_are_1_exactly_on_the_messages_of_the_model(make: Train, config: TrainerConfig) -> None:
    trainer = make(config)
    tokenizer = trainer.tokenizer
    for trajectory in trainer.worker.run(trainer.environment.tasks, torch.Generator().manual_seed(1)):
        assert trajectory.loss_mask[trajectory.response_start :].equal(trajectory.response_mask)
        assert trajectory.response_mask[0] == 1
        written: list[list[int]] = [[]]
        for token, mine in zip(trajectory.input_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
            if mine:
                written[-1].append(token)
            elif written[-1]:
                written.append([])
        replies = [message["content"] for message in trajectory.messages if message["author"] == "llm"]
        assert [tokenizer.reply_text(reply) for reply in written if reply] == replies
        assert all(len(reply) <= trainer.environment.max_reply_tokens for reply in written)


# -- Rollouts of several rows: groups count rollouts, histories come whole, the loss is exact --


def test_a_training_in_which_each_turn_is_a_row() -> None:
    options = replay(offpolicy_trajectories_per_task=2, experience_rbound=None)
    config = replace(HOUSEHOLD, rows="turns", row_weight="rollout", steps=8, replay=options)
    replayed_rows = several = 0
    with ReferenceTrainer(config, environment(config)) as trainer:
        seen: list[tuple[Batch, Tensor]] = []
        computed = trainer.hook.log_probs_computed

        def noting(batch: Batch, current: Tensor) -> Tensor:
            seen.append((batch, old := computed(batch, current)))
            return old

        trainer.hook.log_probs_computed = noting  # type: ignore[method-assign]
        trainer.warm_start()
        manager = trainer.hook.manager
        while trainer.step < config.steps:
            pool = {
                (trajectory.task_id, trajectory.rollout_id): trajectory
                for held in manager.task2trajectories.values()
                for trajectory in held
            }
            trainer.train_step()
            batch, old = seen[-1]
            rollouts, groups = batch.rollouts.tolist(), batch.tensors["group_ids"].tolist()
            members: dict[int, set[int]] = {}
            for rollout, group in zip(rollouts, groups, strict=True):
                members.setdefault(group, set()).add(rollout)
            assert {len(held) for held in members.values()} == {config.n_rollout}, "a group counts rollouts"
            rows_seen = Counter(rollouts)
            for row, extras in enumerate(batch.non_tensors["extras"]):
                if not extras["is_experience_replay"]:
                    continue
                history = pool[batch.non_tensors["task_ids"][row], batch.non_tensors["rollout_ids"][row]]
                parts = rows_of(history)
                assert rows_seen[rollouts[row]] == len(parts), "a history comes whole"
                part = parts[extras["rollout"][1] if "rollout" in extras else 0]
                length = len(part.old_log_probs)
                mask = part.response_mask.bool()
                assert torch.equal(old[row, :length][mask], part.old_log_probs[mask]), "the loss compares with these"
                assert torch.equal(batch.tensors["response_mask"][row, :length].bool(), mask)
                replayed_rows += 1
                several += len(parts) > 1
        assert trainer.metrics["experience_replay/pool_trajectories"] == len(manager)
        # Each turn's row trains only on that turn, so no turn is trained twice.
        assert max(int(row_count(trajectory)) for held in manager.task2trajectories.values() for trajectory in held) > 1
    assert replayed_rows
    assert several


def test_each_turn_a_row() -> None:
    turn = row(2, 6)
    mask = torch.tensor([1, 1, 0, 0, 1, 0])
    turn.response_mask, turn.loss_mask = mask, torch.cat([torch.zeros(2, dtype=torch.int64), mask])
    first, second = rows_of(turns_as_rows(turn))
    assert (first.response_start, second.response_start) == (2, 6)
    assert torch.equal(first.input_ids, turn.input_ids[:4])  # type: ignore[arg-type]
    assert torch.equal(second.input_ids, turn.input_ids[:7])  # type: ignore[arg-type]
    assert [part.loss_mask.tolist() for part in (first, second) if part.loss_mask is not None] == [
        [0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert torch.equal(second.old_log_probs, turn.old_log_probs[4:5])  # type: ignore[arg-type]
    nothing = AgentTrajectory(
        input_ids=torch.tensor([1]), loss_mask=torch.tensor([0]), response_start=1, response_mask=torch.zeros(0).long()
    )
    assert turns_as_rows(nothing) is nothing
