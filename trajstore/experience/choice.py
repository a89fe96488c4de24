"""Which histories of a task come out: the samplers of ``trajstore.sampling``, told of the task's trajectories. Pure."""

from __future__ import annotations

from collections import Counter
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
    entropies: Sequence[float | None],
    global_steps: int,
    generator: np.random.Generator,
    versions_drawn: Counter[int | None] | None = None,
) -> list[int]:
    """Return the places of up to ``n`` entries of one task, best first, none twice.

    How many come back depends on neither ``entropies`` nor ``generator``.

    Args:
        entries: those that may come out, oldest first.
        n: how many at the most.
        rules: say by which sampler.
        uses: how often each was drawn.
        entropies: of each, in nats: the value by which all are told apart, or equally often drawn ones
            (``sampler: {name: least_used}``), unless the rules tell them apart by outcome. ``None`` = unknown, behind
            all others. Those of :func:`undecided` are compared with one another, and with no others.
        global_steps: the step that is going on: age is counted from it.
        generator: seeds the draw of a sampler that leaves something to chance; else it is not touched.
        versions_drawn: how many histories of each policy version the batch has so far, for ``policy_versions: spread``.
    """
    sampler = rules.make_sampler()
    ids = np.arange(len(entries))
    versions = [UNKNOWN_VERSION if entry.policy_version is None else entry.policy_version for entry in entries]
    tasks = [entry.task_id for entry in entries]
    sampler.added(Additions(ids, np.ones(len(ids), np.int64), np.array(versions, np.int64), tasks))
    sampler.reached(global_steps)
    if not rules.is_best_only:
        sampler.used(ids, np.array(uses, np.int64))
    chance = torch.Generator()
    if isinstance(sampler, LeastUsedSampler):
        values = [entry.known_outcome for entry in entries] if rules.exp_select_mode == "reward" else entropies
        sampler.value(ids, [sampler.worst_value if value is None else value for value in values])
    if isinstance(sampler, WeightedSampler):
        chance.manual_seed(int(generator.integers(1 << 62)))
        if sampler.priorities is not None:
            outcomes = [max(entry.known_outcome or 0.0, 0.0) for entry in entries]  # a priority is at least 0
            sampler.update(ids, ids * 0, outcomes)
    spread = rules.policy_versions == "spread"
    if n < 1 or not entries:
        return []
    try:
        order: list[int] = sampler.draw(len(entries) if spread else n, chance).ids.tolist()
    except EmptyBufferError:  # all are used up, or too old for this sampler
        return []
    if not spread:
        return order
    return _spread(order, n, entries, Counter(versions_drawn))


def undecided(entries: Sequence[PoolEntry], n: int, rules: PoolRules, uses: Sequence[int]) -> list[int]:
    """Return the places of entries of which their entropy alone says whether they are among the ``n`` that come out.

    None where there are no more than ``n``, or where how often each was drawn, outcome, age or chance decides. The
    arguments are those of :func:`choose_histories`.
    """
    by_entropy = isinstance(rules.make_sampler(), LeastUsedSampler) and rules.exp_select_mode != "reward"
    if not by_entropy or not 0 < n < len(entries):
        return []
    counts = [0] * len(entries) if rules.is_best_only else uses
    alike = Counter(counts)
    if rules.policy_versions == "spread":  # the versions in the batch say how far down the order it goes
        return [place for place, count in enumerate(counts) if alike[count] > 1]
    last = sorted(counts)[n - 1]
    if sum(count <= last for count in counts) == n:
        return []
    return [place for place, count in enumerate(counts) if count == last]


def _spread(order: Sequence[int], n: int, entries: Sequence[PoolEntry], drawn: Counter[int | None]) -> list[int]:
    """Return the places of up to ``n`` entries, each of the version that was drawn least so far; counts them."""
    left = list(order)
    chosen: list[int] = []
    while left and len(chosen) < n:
        place = min(left, key=lambda at: drawn[entries[at].policy_version])  # the first of the order among equals
        left.remove(place)
        chosen.append(place)
        drawn[entries[place].policy_version] += 1
    return chosen
