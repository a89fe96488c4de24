"""Report facts of new trajectories in commit order, resumable by a cursor."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.store.run_ids import ALONE, ID_LIMIT, RANK_LIMIT, own_id, rank_of_id
from trajstore.errors import ConfigurationError, counted, trajectories
from trajstore.operations.opening import open_readable
from trajstore.query.engine import polars

if TYPE_CHECKING:
    from polars import DataFrame

    from trajstore.query import Query


Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges of ids."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last reported trajectory of each rank.

    Attributes:
        stores: (UUID of the store, highest reported id) by rank.
        unseen: inclusive ranges of lower ids that were set aside before they were reported, by rank.
    """

    stores: Mapping[int, tuple[str, int]]
    unseen: Mapping[int, Ranges] = field(default_factory=dict)

    def __str__(self) -> str:
        stores = {
            str(rank): [store_id, newest, *(self.unseen.get(rank) or ())]
            for rank, (store_id, newest) in sorted(self.stores.items())
        }
        return base64.urlsafe_b64encode(json.dumps(stores, separators=(",", ":")).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse a cursor.

        Raises:
            ConfigurationError: the text is not a cursor.
        """
        try:
            stores_by_rank = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
            stores = {int(rank): (store_id, newest) for rank, (store_id, newest, *_) in stores_by_rank.items()}
            unseen = {
                int(rank): tuple((low, high) for low, high in ranges)
                for rank, (_, _, *ranges) in stores_by_rank.items()
                if ranges
            }
            for rank, (store_id, newest) in stores.items():
                if not (ALONE <= rank < RANK_LIMIT and isinstance(store_id, str)):
                    raise ValueError("rank or store")
                for number in (newest, *(edge for edges in unseen.get(rank, ()) for edge in edges)):
                    if type(number) is not int or not -1 <= number < ID_LIMIT:
                        raise ValueError("id")
        except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"cursor: {text!r} is not a cursor; pass one that tail printed") from error
        return cls(stores, unseen)


@dataclass(frozen=True, slots=True)
class News:
    """The trajectories committed since a cursor.

    Attributes:
        table: facts of the trajectories, in commit order.
        cursors: one per row, to resume after it.
        warnings: sentences on trajectories that cannot be reported, and on replaced stores.
    """

    table: DataFrame
    cursors: list[Cursor]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Contents:
    """The committed trajectories of the stores.

    Attributes:
        query: over their facts.
        table: the facts, in commit order.
        ranks: rank of each trajectory, ``[n]``.
        own: id of each trajectory in its store, ``[n]``.
        stores: (UUID, an id above all committed ones) by rank.
        aside: ids that only snapshots still name, by rank.
        stride: distance of consecutive ids of a store.
    """

    query: Query
    table: DataFrame
    ranks: IntArray
    own: IntArray
    stores: Mapping[int, tuple[str, int]]
    aside: Mapping[int, IntArray]
    stride: int


class Handle(Protocol):
    """The stores of Ray: a :class:`~trajstore.distributed.DistributedReplayBuffer`."""

    sink: Any

    def refresh(self) -> None:
        """Fetch changes from the stores."""

    def query(self) -> Query:
        """Return a query over the trajectories of all stores."""


class Tail:
    """Reports new commits to a store or a run.

    Args:
        store: path or URL, as for :meth:`Reader.open`, or a handle of the stores of Ray.
        since: cursor to resume from, of the path or the handle of the same stores; None starts at the first trajectory.

    Raises:
        StoreNotFoundError, CorruptStoreError: as for :meth:`Reader.open`.
        ConfigurationError: ``store`` is something else.
        MissingDependencyError: Polars is not installed.
    """

    def __init__(self, store: str | Path | Handle, since: Cursor | None = None) -> None:
        polars()
        self.damage: str | None = None
        """Sentence on damage that was left out; None if there is none."""
        self._source: Reader | Handle
        if isinstance(store, str | Path):
            self._source, self.damage = open_readable(store, pending=False)
        elif isinstance(store, Reader) or not hasattr(store, "sink"):
            raise ConfigurationError(f"Tail: {type(store).__name__}, must be a path, a URL, or a handle of stores")
        else:
            self._source = store
        self.cursor = since or Cursor({})
        """Cursor after the last reported trajectory."""

    def close(self) -> None:
        """Release the reader's lease; a handle stays open."""
        if isinstance(self._source, Reader):
            self._source.close()

    def refresh(self) -> None:
        """Read new commits.

        Raises:
            StoreError: the directory cannot be read; the previous contents stay.
        """
        self._source.refresh()

    def news(self, where: str | None = None) -> News:
        """Return the trajectories committed after the cursor, and advance it.

        Trajectories that a rollback set aside before they were reported are reported once they are restored.

        Args:
            where: SQL condition on facts; the cursor also passes trajectories that do not match.

        Raises:
            ConfigurationError: the condition is invalid; the cursor stays.
            StoreUnreachableError: a store of the handle does not answer.
        """
        pl = polars()
        contents, before = self._contents(), self.cursor
        table, ranks, own = contents.table, contents.ranks, contents.own
        matching = np.ones(len(own), np.bool_)
        if where is not None:
            matching = np.isin(table["trajectory_id"].to_numpy(), contents.query.where(where).ids())
        warnings: list[str] = []
        seen, unseen = self._seen(contents.stores, warnings)
        fresh = own > np.array([seen[rank][1] for rank in ranks.tolist()], np.int64)
        passed: dict[int, _Passed] = {}
        for rank, (store_id, newest) in seen.items():
            mine, ranges = ranks == rank, unseen.get(rank, ())
            fresh[mine] |= _lie_in(own[mine], ranges)
            passed[rank] = _Passed.of(own[mine], fresh[mine], contents.aside[rank], newest, ranges)
            if rank in before.stores and before.stores[rank][0] == store_id:
                warnings += passed[rank].warnings(own[mine & fresh], contents.aside[rank], contents.stride)
        cursors, shown = [], {**before.stores, **seen}
        left = {**before.unseen, **{rank: after.ranges(after.newest, -1) for rank, after in passed.items()}}
        for rank, number in zip(ranks[fresh].tolist(), own[fresh].tolist(), strict=True):
            shown = {**shown, rank: (seen[rank][0], max(number, shown[rank][1]))}
            left = {**left, rank: passed[rank].ranges(shown[rank][1], number)}
            cursors.append(Cursor(shown, left))
        self.cursor = Cursor(shown, {**left, **{rank: after.ranges(shown[rank][1]) for rank, after in passed.items()}})
        kept = matching[fresh].tolist()
        cursors = [cursor for cursor, keep in zip(cursors, kept, strict=True) if keep]
        return News(table.filter(pl.Series(fresh & matching)), cursors, warnings)

    def _contents(self) -> _Contents:
        source = self._source
        query = source.query()
        table = query.table()
        ids = table["trajectory_id"].to_numpy()
        if isinstance(source, Reader):
            catalogs = source.live.catalogs_by_rank()
            none = np.zeros(0, np.int64)
            stores = source.live.stores_by_rank()
            aside = {rank: catalogs[rank].pinned["trajectory_id"] if rank in catalogs else none for rank in stores}
            return _Contents(query, table, rank_of_id(ids), own_id(ids), stores, aside, 1)
        stores, aside = source.sink.commits()
        stride = source.sink.stride
        ranks = ids % stride
        committed = ids < np.array([stores[rank][1] for rank in ranks.tolist()], np.int64)
        table = table.filter(polars().Series(committed))
        return _Contents(query, table, ranks[committed], ids[committed], stores, aside, stride)

    def _seen(
        self, stores: Mapping[int, tuple[str, int]], warnings: list[str]
    ) -> tuple[dict[int, tuple[str, int]], dict[int, Ranges]]:
        """Return what the cursor says of the present stores; append warnings of replaced ones."""
        seen, before = {rank: (store_id, -1) for rank, (store_id, _) in stores.items()}, self.cursor.stores
        for rank, (store_id, next_id) in stores.items():
            place = "" if rank == ALONE else f" (rank {rank})"
            if rank in before and before[rank][0] != store_id:
                warnings.append(f"another store lies there than before{place}; all that it has is shown")
            elif rank in before and before[rank][1] < next_id:
                seen[rank] = before[rank]
            elif rank in before:
                seen[rank] = store_id, next_id - 1
                warnings.append(
                    f"an older copy of the store lies there{place}; what is committed to it from now on is shown"
                )
        same = [rank for rank in seen if rank in before and before[rank][0] == seen[rank][0]]
        return seen, {rank: self.cursor.unseen[rank] for rank in same if rank in self.cursor.unseen}


@dataclass(frozen=True, slots=True)
class _Passed:
    """Ranges of a store's ids that a cursor passes without reporting them.

    Attributes:
        aside: ids that only snapshots name and that were never reported.
        restored: ids up to the last reported one that are live again, reported in ascending order.
        newest: the last reported id.
    """

    aside: Ranges
    restored: Ranges
    newest: int

    @classmethod
    def of(cls, own: IntArray, fresh: npt.NDArray[np.bool_], aside: IntArray, newest: int, unseen: Ranges) -> _Passed:
        """Return the ranges of a store.

        Args:
            own: its live ids.
            fresh: which of them are reported now.
            aside: the ids that only snapshots name.
            newest: the last reported id.
            unseen: ranges of lower ids that were not reported.
        """
        never = aside[(aside > newest) | _lie_in(aside, unseen)]
        known = np.union1d(own, aside)
        restored = own[fresh & (own <= newest)]
        return cls(_ranges(np.isin(known, never), known), _ranges(np.isin(known, restored), known), newest)

    def warnings(self, reported: IntArray, aside: IntArray, stride: int) -> list[str]:
        """Return sentences on the ids between the last reported one and the highest of ``reported`` that are not."""
        new = reported[reported > self.newest]
        end = int(new.max()) if len(new) else self.newest
        waiting = int(np.count_nonzero((aside > self.newest) & (aside <= end)))
        first = self.newest if self.newest >= 0 else end % stride - stride
        left = (end - first) // stride - len(new) - waiting if len(new) else 0
        have = counted(left, "id", "before the newest has", "before the newest have")
        return [
            *(
                [f"{have} no trajectory: evicted or rolled back before it could be shown, or never assigned"]
                * bool(left)
            ),
            *(
                [f"{trajectories(waiting, 'was', 'were')} set aside before being shown; shown once restored"]
                * bool(waiting)
            ),
        ]

    def ranges(self, newest: int, reported: int | None = None) -> Ranges:
        """Return the unreported ranges up to ``newest``, after ``reported`` was; None = after all."""
        aside = [(low, min(high, newest)) for low, high in self.aside if low <= newest]
        if reported is None:
            return tuple(aside)
        return (*aside, *((max(low, reported + 1), high) for low, high in self.restored if high > reported))


def _ranges(chosen: npt.NDArray[np.bool_], ids: IntArray) -> Ranges:
    """Return the inclusive ranges of neighbours that are chosen among ascending ids."""
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return tuple(zip(ids[edges[:-1] > 0].tolist(), ids[edges[1:] < 0].tolist(), strict=True))


def _lie_in(ids: IntArray, ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Return for each id whether it is in one of the ranges."""
    inside = np.zeros(len(ids), np.bool_)
    for low, high in ranges:
        inside |= (ids >= low) & (ids <= high)
    return inside
