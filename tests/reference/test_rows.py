"""Rollouts of several rows in the reference trainer: groups count rollouts, histories come whole, the loss is exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.reference.runs import HOUSEHOLD, SORT, environment, replay
from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.batch import Batch
from trainer_hooks.reference.trainer import ReferenceTrainer
from trajstore.errors import ConfigurationError
from trajstore.experience.rows import row_count, rows_of


def test_a_group_counts_each_rollout_once() -> None:
    outcomes = [1.0, 0.0, 0.0]
    rows = [0, 0, 0, 1, 2, 2]
    rewards = torch.tensor([[outcomes[one]] for one in rows])
    mask = torch.ones(6, 1)
    group = torch.zeros(6, dtype=torch.int64)
    found, _ = compute_grpo_outcome_advantage(rewards, mask, group, rollouts=torch.tensor(rows))
    alone, _ = compute_grpo_outcome_advantage(torch.tensor(outcomes)[:, None], torch.ones(3, 1), group[:3])
    torch.testing.assert_close(found, alone[torch.tensor(rows)])
    shared = share_by_rollout(found, torch.tensor(rows))
    torch.testing.assert_close(shared[:, 0] * torch.tensor([3.0, 3, 3, 1, 2, 2]), found[:, 0])


def test_a_training_in_which_each_turn_is_a_row() -> None:
    options = replay(offpolicy_trajectories_per_task=2, experience_rbound=None, use_current_policy_entropy=True)
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
        assert manager is not None
        while trainer.step < config.steps:
            pool = {(one.task_id, one.rollout_id): one for held in manager.task2trajectories.values() for one in held}
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
                assert part.old_log_probs is not None
                assert part.response_mask is not None
                length = len(part.old_log_probs)
                mask = part.response_mask.bool()
                assert torch.equal(old[row, :length][mask], part.old_log_probs[mask]), "the loss compares with these"
                assert torch.equal(batch.tensors["response_mask"][row, :length].bool(), mask)
                replayed_rows += 1
                several += len(parts) > 1
        assert trainer.metrics["experience_replay/pool_trajectories"] == len(manager)
        # Each turn's row trains on that turn alone: none is trained on twice.
        assert max(int(row_count(one)) for held in manager.task2trajectories.values() for one in held) > 1
    assert replayed_rows
    assert several


def test_options_of_rows() -> None:
    with pytest.raises(ConfigurationError, match="rows: 'turn', must be one of rollout, turns"):
        replace(SORT, rows="turn")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="row_weight: 'x', must be one of row, rollout"):
        replace(SORT, row_weight="x")  # type: ignore[arg-type]
