"""Which histories of a task come out: the samplers of ``trajstore.sampling``, told of the task's trajectories. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.errors import EmptyBufferError
from trajstore.experience.entry import PoolEntry
from trajstore.experience.rules import PoolRules
from trajstore.sampling import Additions, LeastUsedSampler, WeightedSampler


def choose_histories(
    entries: Sequence[PoolEntry],
    n: int,
    rules: PoolRules,
    *,
    uses: Sequence[int],
    entropies: Sequence[float],
    global_steps: int,
    generator: np.random.Generator,
) -> list[int]:
    """Return the places of up to ``n`` entries of one task, best first, none twice.

    Args:
        entries: those that may come out, oldest first.
        n: how many at the most.
        rules: say by which sampler.
        uses: how often each was drawn.
        entropies: of each, in nats: the value by which equally often drawn ones are told apart.
        global_steps: the step that is going on: age is counted from it.
        generator: seeds the draw of a sampler that leaves something to chance; else it is not touched.
    """
    sampler = rules.make_sampler()
    ids = np.arange(len(entries))
    versions = [UNKNOWN_VERSION if entry.policy_version is None else entry.policy_version for entry in entries]
    tasks = [entry.task_id for entry in entries]
    sampler.added(Additions(ids, np.ones(len(ids), np.int64), np.array(versions, np.int64), tasks))
    sampler.reached(global_steps)
    sampler.used(ids, np.array(uses, np.int64))
    chance = torch.Generator()
    if isinstance(sampler, LeastUsedSampler):
        sampler.value(ids, entropies)
    if isinstance(sampler, WeightedSampler):
        chance.manual_seed(int(generator.integers(1 << 62)))
        if sampler.priorities is not None:
            sampler.update(ids, ids * 0, [_priority(entry) for entry in entries])
    try:
        chosen: list[int] = sampler.draw(n, chance).ids.tolist()
    except EmptyBufferError:  # all are used up, or too old for this sampler
        return []
    return chosen


def _priority(entry: PoolEntry) -> float:
    """Return an outcome as a priority: at least 0, and 0 where it is not known."""
    return 0.0 if entry.outcome is None or not math.isfinite(entry.outcome) else max(entry.outcome, 0.0)
