"""New commits of a run's stores: what they name, and what all of them together change in the entries that are shown.

A reader of a run has one index of all ranks, and their catalogs have none. So it lends each catalog the entries that
its news names, lets it apply the news to them, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.columns.facts import SCORE
from trajstore._core.store.additions import NewEntries
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.committed import NONSENSE
from trajstore._core.store.facts import MOST_SCORES
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.json_arrays import StringTable
from trajstore._core.store.log_records import LogTail, parse_ranges
from trajstore._core.store.notes import Noted
from trajstore._core.store.row_location import STARTS
from trajstore._core.store.run_ids import ID_LIMIT, in_run
from trajstore.errors import CorruptStoreError

Tails = Sequence[tuple[str, LogTail]]
"""New log records of a store, by segment, see :meth:`~trajstore._core.store.catalog.Catalog.news`."""


@dataclass(frozen=True, slots=True)
class StoreNews:
    """What new commits of one store change in the entries of a run; positions are those before the change.

    Attributes:
        source: number of the source.
        gone: positions of evicted entries.
        moved: positions of entries that are in other shards now.
        locations: of these, by row of the store's shard table, ``[n, 4]``.
        noted: positions of entries with new late values.
        late: of these, all values of the names that are new on some of them, as columns of the store's index.
        added: columns of the new entries, as in the store's index, but with ids of the run.
        texts: string table of ``late`` and ``added``.
        facts: names of the columns that the commits brought.
    """

    source: int
    gone: npt.NDArray[np.intp]
    moved: npt.NDArray[np.intp]
    locations: IntArray
    noted: npt.NDArray[np.intp]
    late: dict[str, npt.NDArray[Any]]
    added: dict[str, npt.NDArray[Any]]
    texts: StringTable
    facts: frozenset[str]


def named_in(tails: Tails) -> IntArray:
    """Return the ids of existing trajectories that records name, as inclusive ranges ``[n, 2]``."""
    found = [np.zeros((0, 2), np.int64)]
    for record in (record for _, tail in tails for record in tail.records):
        with suppress(*NONSENSE, CorruptStoreError):  # refused when it is applied
            if record["operation"] == "annotate":
                found.append(parse_ranges([[number, number] for number in record["ids"]]))
            elif record["operation"] != "add":
                found.append(parse_ranges(record["ids"]))
    return np.minimum(np.concatenate(found), ID_LIMIT - 1)


def taken_in(
    catalog: Catalog, tails: Tails, source: int, rank: int, lent: TrajectoryIndex, positions: npt.NDArray[np.intp]
) -> StoreNews:
    """Apply records to a catalog without entries of its own; return what they change.

    Args:
        catalog: of the store.
        tails: the records.
        source: number of the source.
        rank: of the store.
        lent: the entries that the records name, as the store's index would have them; changed.
        positions: of these in the run's index.

    Raises:
        CorruptStoreError: a record is invalid.
    """
    places = [lent.table, *STARTS]
    ids, next_id = lent["trajectory_id"].copy(), catalog.next_id
    before = np.stack([lent[name] for name in places], axis=1)
    facts: set[str] = set()
    given: set[str] = set()
    noted = [np.zeros(0, np.int64)]
    catalog.index = lent
    for change in catalog.changes(tails):
        if isinstance(change, NewEntries | Noted):
            facts |= change.columns.keys()
        if isinstance(change, Noted):
            given |= change.columns.keys()
            noted.append(change.ids)
    catalog.forget_entries()
    found = lent.find_many(ids)
    stay = found >= 0
    found, kept = found[stay], positions[stay]
    after = np.stack([lent.at(name, found) for name in places], axis=1).astype(np.int64)
    moved = (after != before[stay]).any(axis=1)
    annotated = np.isin(ids[stay], np.concatenate(noted))
    late = {name: column for name, column in lent.take(found[annotated]).items() if name in given}
    added = lent.take(lent.first + np.flatnonzero(lent["trajectory_id"] >= next_id))
    added["trajectory_id"] = in_run(rank, added["trajectory_id"])
    return StoreNews(
        source, positions[~stay], kept[moved], after[moved], kept[annotated], late, added, lent.texts, frozenset(facts)
    )


def can_follow(index: TrajectoryIndex, news: Sequence[StoreNews], newest: Sequence[int]) -> bool:
    """Return whether changes leave the entries of a run as loading it would show them.

    Not where a store's commit times do not ascend, where a UUID may be there twice, so that one of two trajectories is
    hidden, and where there are more scores than an index has: which of them are facts depends on the order.

    Args:
        index: of the run.
        news: the changes.
        newest: commit time of the newest trajectory of each changed store.
    """
    for item, time in zip(news, newest, strict=True):
        if np.any(np.diff(item.added["committed"], prepend=time) < 0):
            return False
    scores = {name for name in index.facts if name.startswith(SCORE)}
    scores |= {name for item in news for name in item.facts if name.startswith(SCORE)}
    new = np.concatenate([item.added["uuid"] for item in news])
    return len(scores) <= MOST_SCORES and not _may_repeat(index["uuid"], new)


def _may_repeat(known: npt.NDArray[Any], new: npt.NDArray[Any]) -> bool:
    """Return whether a UUID of ``new`` may be there twice."""
    alike = np.zeros(1 << 16, np.bool_)
    alike[new.view(np.uint16)[::8]] = True
    near = known[alike[known.view(np.uint16)[::8]]] if len(new) else new
    halves = np.concatenate([near, new]).view(np.uint64)[::2]
    return len(np.unique(halves)) < len(halves)
