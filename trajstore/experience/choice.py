"""Which histories of a task come out. Pure; the generator is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from trajstore.experience.entry import PoolEntry
from trajstore.experience.rules import PoolRules


def choose_histories(
    entries: Sequence[PoolEntry],
    n: int,
    rules: PoolRules,
    *,
    uses: Sequence[int],
    entropies: Sequence[float | None],
    generator: np.random.Generator,
    versions_drawn: Counter[int | None] | None = None,
) -> list[int]:
    """Return the places of up to ``n`` entries of one task, best first, none twice.

    How many come back depends on neither ``entropies`` nor ``generator``.

    Args:
        entries: those that may come out, oldest first; of equally good ones the older comes.
        n: how many at the most.
        rules: say what is best.
        uses: how often each was drawn; counts with ``in_turns``.
        entropies: of each, in nats: the value by which they are told apart, unless the rules go by outcome. ``None`` =
            unknown, behind all others. Those of :func:`undecided` are compared with one another, and with no others.
        generator: of ``exp_select_mode: random``; else it is not touched.
        versions_drawn: how many histories of each policy version the batch has so far, for ``policy_versions: spread``.
    """
    if n < 1 or not entries:
        return []
    if rules.exp_select_mode == "random":
        order: list[int] = generator.permutation(len(entries)).tolist()
    else:
        sign = 1.0 if rules.exp_select_mode == "argmin" else -1.0
        values = [one.known_outcome for one in entries] if rules.exp_select_mode == "reward" else entropies
        ranks = [(1, 0.0) if value is None else (0, sign * value) for value in values]
        order = sorted(range(len(entries)), key=ranks.__getitem__)
    if rules.in_turns:
        order.sort(key=uses.__getitem__)
    if rules.policy_versions == "any":
        return order[:n]
    return _spread(order, n, entries, Counter(versions_drawn))


def undecided(entries: Sequence[PoolEntry], n: int, rules: PoolRules, uses: Sequence[int]) -> list[int]:
    """Return the places of entries of which their entropy alone says whether they are among the ``n`` that come out.

    None where there are no more than ``n``, or where how often each was drawn, outcome or chance decides. The
    arguments are those of :func:`choose_histories`.
    """
    if rules.exp_select_mode not in ("argmin", "argmax") or not 0 < n < len(entries):
        return []
    counts = uses if rules.in_turns else [0] * len(entries)
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
