"""Which replayed rows fit into verl's mini-batches, and where in these they stand. Pure.

verl fills a batch up to a multiple of ``ppo_mini_batch_size * n`` rows with rows that count for nothing, and cuts it
into mini-batches in the order of its rows. A history too many would make a mini-batch, and an optimizer step, of
padding; histories that stand together would make one of themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def surplus(rows_of_histories: Sequence[int], fresh: int, planned: int, multiple: int) -> int:
    """Return how many histories, the last first, have to go so that verl makes no mini-batch for them.

    Args:
        rows_of_histories: rows that each history has.
        fresh: rows of the rollouts that were made.
        planned: rows that the batch has if each rollout, made or replayed, has one.
        multiple: verl's multiple.
    """
    room = math.ceil(max(fresh, planned) / multiple) * multiple - fresh
    kept, rows = 0, 0
    for count in rows_of_histories:
        rows += count
        if rows > room:
            break
        kept += 1
    return len(rows_of_histories) - kept


def spread(kinds: Sequence[int], ranks: int, mini_batches: int) -> list[int]:
    """Return an order of rows in which each mini-batch has its share of each kind.

    Each rank keeps its rows. The number of rows of kind 0 differs by one between two mini-batches at the most, that of
    another kind by one on each rank.

    Args:
        kinds: of each row, 0 for those that count most; the first ``len(kinds) / ranks`` rows are those of the first
            rank, and so on.
        ranks: divide the rows.
        mini_batches: divide the rows of a rank; verl cuts these in their order.

    Returns:
        Places in ``kinds``; within a rank's part of a mini-batch, rows keep their order.
    """
    each = len(kinds) // ranks
    order: list[int] = []
    turn = 0
    for first in range(0, len(kinds), each):
        places = sorted(range(first, first + each), key=kinds.__getitem__)
        parts = [sorted(places[(number - turn) % mini_batches :: mini_batches]) for number in range(mini_batches)]
        order += [place for part in parts for place in part]
        turn += sum(kinds[place] == 0 for place in places)
    return order
