"""The figures of replay that a training step shows: gathered while it goes on, handed out when it is done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from trainer_hooks import metrics
from trainer_hooks.batch import Batch
from trainer_hooks.masks import compute_response_mask
from trajstore.experience import ExperienceManager

WARN_EVERY = 100
"""Steps for which a warning that a batch is far off-policy is not repeated."""

STARVING_STEPS = 20
"""A bucket starves if its tasks could be replayed but were not drawn in this many steps."""


class ReplayFigures:
    """Gathers what one step shows of replay, and what the last steps drew from the pool."""

    def __init__(self, manager: ExperienceManager) -> None:
        self.times = metrics.StepTimes()
        self._manager = manager
        self._figures: list[Mapping[str, float]] = []
        self._drawn: deque[tuple[Counter[int], Counter[int]]] = deque(maxlen=STARVING_STEPS)
        self._difficulty: dict[str, int] = {}
        self._quiet_until = 0

    def note_drawn(self, tasks: Sequence[str]) -> None:
        """Remember which buckets could be replayed in this step, and which were."""
        buckets = self._manager.difficulty2task_dict
        self._difficulty = {task: difficulty for difficulty, held in buckets.items() for task in held}
        valid = Counter(self._difficulty[task] for task in self._manager.get_valid_replay_task_ids())
        self._drawn.append((valid, Counter(self._difficulty[task] for task in tasks)))

    def note(self, figures: Mapping[str, float]) -> None:
        """Take figures; :meth:`take` returns each name's mean."""
        self._figures.append(figures)

    def note_loss(
        self,
        batch: Batch,
        rows: Sequence[int],
        loss: Mapping[str, Tensor],
        advantages: Tensor,
        cliprange_low: float,
        off_cliprange_high: float,
    ) -> None:
        """Take the figures of one loss computation over some rows of a batch; see ``ReplayHook.loss_computed``."""
        response_mask = batch.tensors["response_mask"][list(rows)]
        exp_mask = compute_response_mask(batch.tensors["exp_mask"], response_mask.shape[1])[list(rows)]
        self.note(metrics.loss_metrics(loss, response_mask, exp_mask))
        ratio, off_policy = loss["importance_ratio"], exp_mask * response_mask
        for name, labels in (("age", self._ages(batch, rows)), ("difficulty", self._difficulties(batch, rows))):
            clipped = metrics.clip_fraction_by(labels, ratio, advantages, off_policy, cliprange_low, off_cliprange_high)
            self.note(metrics.named(f"off_clipped_by_{name}", clipped))
            sizes = _sample_sizes(labels, ratio, off_policy)
            self.note(metrics.named(f"off_effective_sample_size_by_{name}", sizes))

    def _ages(self, batch: Batch, rows: Sequence[int]) -> list[int | None]:
        """Return the age of each replayed row's policy in steps; None for other rows."""
        extras = [batch.non_tensors["extras"][row] for row in rows]
        return [
            None
            if not one["is_experience_replay"]
            or one["policy_version"] is None
            or one["policy_version"] > self._manager.global_steps
            else self._manager.global_steps - one["policy_version"]
            for one in extras
        ]

    def _difficulties(self, batch: Batch, rows: Sequence[int]) -> list[int | None]:
        """Return the bucket from which each replayed row's task was drawn; None for other rows."""
        return [
            self._difficulty.get(batch.non_tensors["task_ids"][row])
            if batch.non_tensors["extras"][row]["is_experience_replay"]
            else None
            for row in rows
        ]

    def take(
        self, task_ids: Sequence[str], is_experience_replay: Sequence[bool], policy_versions: Sequence[int | None]
    ) -> dict[str, float]:
        """Return all metrics of the step, and begin anew. Every argument has one entry per row of the batch."""
        figures = _means(self._figures)
        self.warn(figures)
        result = figures | self._manager.metrics() | self.times.take()
        result |= metrics.batch_metrics(task_ids, is_experience_replay, policy_versions, self._manager.global_steps)
        valid: Counter[int] = sum((could for could, _ in self._drawn), Counter())
        drawn: Counter[int] = sum((did for _, did in self._drawn), Counter())
        if len(self._drawn) == STARVING_STEPS:
            result[f"{metrics.PREFIX}starving_buckets"] = float(len(metrics.starving_buckets(valid, drawn)))
        self._figures = []
        return result

    def warn(self, figures: Mapping[str, float]) -> None:
        """Log a warning if a step's figures show a batch far off-policy; not again within :data:`WARN_EVERY` steps."""
        share = figures.get(f"{metrics.PREFIX}off_policy_share", 0.0)
        ratio = figures.get(f"{metrics.PREFIX}off_ratio_max", 1.0)
        far = share > metrics.OFF_POLICY_SHARE_LIMIT or ratio > metrics.OFF_POLICY_RATIO_LIMIT
        if far and self._manager.global_steps >= self._quiet_until:
            self._quiet_until = self._manager.global_steps + WARN_EVERY
            metrics.warn_if_far_off_policy(figures)


def _sample_sizes(labels: Sequence[int | None], ratio: Tensor, off_policy: Tensor) -> dict[int, float]:
    """Return the effective sample size of each label's tokens; labels without a token are left out."""
    sizes: dict[int, float] = {}
    for label in dict.fromkeys(labels):
        if label is None:
            continue
        chosen = torch.tensor([other == label for other in labels], device=ratio.device)
        size = metrics.effective_sample_size(ratio[chosen], off_policy[chosen])
        if size is not None:
            sizes[label] = size
    return sizes


def _means(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each name's mean over the mappings that have it; of maxima the largest, of minima the smallest."""
    values: dict[str, list[float]] = {}
    for one in figures:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {
        name: (max if name.endswith("_max") else min if name.endswith("_min") else fmean)(found)
        for name, found in values.items()
    }
