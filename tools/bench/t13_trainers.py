"""Trainers of T13's arms that are not experience replay by the hook: more work on fresh rollouts, and plain buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from examples.grpo.config import TrainerConfig
from examples.grpo.trainer import ReferenceTrainer
from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import Batch, BatchRow
from trainer_hooks.plan import MixedTasks
from trajstore.trajectory import AgentTrajectory

ROWS = 128
"""Rows that each step trains on in every arm, replayed and repeated ones included."""


class RepeatingTrainer(ReferenceTrainer):
    """Trains on fresh rollouts alone, some of them twice, so that each step has ``ROWS`` rows."""

    def _parts(self, rows: int) -> Sequence[Tensor]:
        orders = [torch.randperm(rows, generator=self._order) for _ in range(-(-ROWS // rows))]
        return torch.cat(orders)[:ROWS].chunk(self.config.minibatches)


class ChoosingTrainer(RepeatingTrainer):
    """Trains on the tasks that replay chooses, with fresh rollouts in the place of their histories."""

    def _rows(self, step: int) -> tuple[list[BatchRow], list[AgentTrajectory]]:
        mixed = self.hook.tasks_chosen(self._next_tasks(), (step - 1) / self.config.steps, step)
        plan = self.hook.before_rollout(MixedTasks((), (*mixed.experience, *mixed.on_policy)))
        fresh = self._roll_out(plan, step)
        return self.hook.batch_rows(plan, fresh), fresh


class BufferTrainer(ReferenceTrainer):
    """Trains on rows drawn from a FIFO buffer of rollouts, failures included; drawing removes nothing.

    A row keeps the advantage that it had in the group it was sampled in. All ratios are relative to the recorded
    log-probabilities, and all rows have the clip range of fresh ones.

    Args:
        config: the run.
        capacity: rollouts in the buffer; the oldest give way.
        whole_groups: whether the step trains on all of its fresh rollouts, and fills its rows with stored groups of
            unequal outcomes; otherwise all rows are drawn evenly from the buffer, which the fresh rollouts have entered
            (arXiv 2604.08706).
    """

    def __init__(self, config: TrainerConfig, capacity: int, whole_groups: bool) -> None:
        super().__init__(config)
        self._whole_groups = whole_groups
        self._held: deque[list[tuple[BatchRow, float]]] = deque(maxlen=capacity // config.n_rollout)
        self._random = Random(config.seed)
        self._drawn: list[float] = []

    def _rows(self, step: int) -> tuple[list[BatchRow], list[AgentTrajectory]]:
        rows, fresh = super()._rows(step)
        groups = self._groups(rows)
        if self._whole_groups:
            mixed = [group for group in self._held if any(advantage for _, advantage in group)]
            room = (ROWS - len(rows)) // self.config.n_rollout
            chosen = [*groups, *self._random.sample(mixed, min(room, len(mixed)))]
            drawn = [row for group in chosen for row in group]
            self._held.extend(groups)
        else:
            self._held.extend(groups)
            every = [row for group in self._held for row in group]
            drawn = self._random.sample(every, min(ROWS, len(every)))
        self._drawn = [advantage for _, advantage in drawn]
        return [row for row, _ in drawn], fresh

    @staticmethod
    def _groups(rows: Sequence[BatchRow]) -> list[list[tuple[BatchRow, float]]]:
        """Return the rows of each group with their advantages."""
        outcomes = torch.tensor([[row.trajectory.reward.outcome] for row in rows])  # type: ignore[union-attr]
        numbers = torch.tensor([row.group_id for row in rows])
        advantages, _ = compute_grpo_outcome_advantage(outcomes, torch.ones_like(outcomes), numbers)
        groups: dict[int, list[tuple[BatchRow, float]]] = {}
        for row, advantage in zip(rows, advantages[:, 0].tolist(), strict=True):
            groups.setdefault(row.group_id, []).append((row, advantage))
        return list(groups.values())

    def _old_log_probs(self, batch: Batch, current: Tensor) -> Tensor:
        return torch.where(batch.tensors["recorded_mask"], batch.tensors["recorded_old_log_probs"], current)

    def _advantages(self, batch: Batch, outcomes: Sequence[float]) -> Tensor:
        return torch.tensor(self._drawn)[:, None] * batch.tensors["response_mask"]
