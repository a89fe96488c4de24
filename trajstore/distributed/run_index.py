"""The trajectories of all stores, as one handle knows them; draws need no request. Pure; no I/O.

Ids order trajectories by age: see "Ids are clocks" in docs/design/many-machines.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions, Drawn, Sampler
from trajstore._core.sampling.draws import Draws, Window
from trajstore._core.sampling.selection import first_difference, rearrange
from trajstore.distributed.change_log import Changes, without
from trajstore.distributed.compact_table import CompactTable, marks_of
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import EmptyBufferError, listed

_EMPTY = np.zeros(0, np.int64)
_NONE = Additions(_EMPTY, _EMPTY, _EMPTY, names=_EMPTY)


class RunIndex:
    """The trajectories of the responsive stores, ordered by id, oldest first.

    Only *settled* trajectories are shown: those with ids below every id that a store may still assign. So a
    trajectory shown earlier is always older than one shown later, whichever store has it. When a resent batch leaves
    a trajectory in two stores, the newer copy is shown.

    Attributes:
        table: the trajectories that can be drawn; another object after each change.
        revision: number of changes of ``table``.
        hidden: the trajectories of which another store has a newer copy.
    """

    def __init__(self) -> None:
        self.table = CompactTable.of(_EMPTY, _EMPTY, _EMPTY)
        self.hidden = _NONE
        self.revision = 0
        self._pending: list[Additions] = []
        """Trajectories that are not shown yet."""
        self._newest: dict[int, int] = {}
        """Id of the newest copy of each trajectory with copies, by name."""
        self._received: dict[int, Changes] = {}
        """The last answer of each store, without its changes."""
        self._absent: set[int] = set()
        self._settled = 0

    def received(self, rank: int) -> tuple[str, int]:
        """Return ``began`` and ``cursor`` of a store's last :class:`Changes`; of none if it was left out since."""
        last = self._received.get(rank)
        return ("", -1) if last is None or rank in self._absent else (last.began, last.cursor)

    def has_answered(self, rank: int) -> bool:
        """Return whether a store has ever answered."""
        return rank in self._received

    @property
    def clock(self) -> int:
        """The highest ``next_id`` that the stores have reported."""
        return max((last.next_id for last in self._received.values()), default=0)

    @property
    def behind(self) -> list[int]:
        """Ranks of the stores that may still assign an id below :attr:`clock`, as they have not received it yet."""
        clock = self.clock
        return [rank for rank, last in self._received.items() if rank not in self._absent and last.next_id < clock]

    def take(self, rank: int, news: Changes) -> bool:
        """Take in a store's changes; call :meth:`show` after those of all stores.

        Returns:
            False if they continue from an answer that is gone, as the store was left out since: ask for everything.
        """
        if rank in self._absent and not news.whole:
            return False
        if news.whole:
            self._drop(rank)
        for change in news.changes:
            if isinstance(change, Additions):
                self._pending.append(change)
            else:
                self.remove(change)
        self._absent.discard(rank)
        self._received[rank] = replace(news, whole=False, changes=[])
        return True

    def remove(self, ids: IntArray) -> None:
        """Remove trajectories that their stores have evicted."""
        at = self.table.find(ids)
        if (at >= 0).any():
            self._remove_at(at[at >= 0])
        self._pending = [without(part, ids) for part in self._pending]
        self.hidden = without(self.hidden, ids)

    def leave_out(self, rank: int) -> int:
        """Exclude a store from draws until it reports everything; return the number of trajectories excluded."""
        if rank in self._absent:
            return 0
        self._absent.add(rank)
        return self._drop(rank)

    def _drop(self, rank: int) -> int:
        mask = self.table.of_ranks([rank])
        count = int(np.count_nonzero(mask))
        if count:
            self._remove_at(np.flatnonzero(mask))
        self._pending = [part.at(np.flatnonzero(part.ids % MOST_STORES != rank)) for part in self._pending]
        self.hidden = self.hidden.at(np.flatnonzero(self.hidden.ids % MOST_STORES != rank))
        return count

    def _remove_at(self, positions: npt.NDArray[np.intp]) -> None:
        mask = np.ones(len(self.table), np.bool_)
        mask[positions] = False
        self.table = self.table.kept(mask)
        self.revision += 1

    def show(self, names_of: Callable[[IntArray], IntArray]) -> None:
        """Show the settled trajectories, the newer of two copies.

        Args:
            names_of: returns the first half of the UUIDs of shown trajectories, ``[n]``, 0 = unknown; called for those
                that may have a copy: few.
        """
        given = [last.next_id for rank, last in self._received.items() if rank not in self._absent]
        self._settled = max(self._settled, min(given, default=0))
        self._bring_back()
        if not any(map(len, self._pending)):
            return
        rows = Additions.joined(self._pending)
        self._pending = []
        if np.any(rows.ids[1:] < rows.ids[:-1]):
            rows = rows.at(np.argsort(rows.ids, kind="stable"))
        settled = int(np.searchsorted(rows.ids, self._settled))
        if settled < len(rows):
            self._pending = [rows.at(np.arange(settled, len(rows)))]
            rows = rows.at(np.arange(settled))
        rows = self._hide_copies(rows, names_of)
        if len(rows):
            self.table = self.table.with_rows(rows.ids, rows.samples, _names(rows))
            self.revision += 1

    def _bring_back(self) -> None:
        """Show the older copies of trajectories whose newest copy is gone."""
        if not len(self.hidden):
            self._newest.clear()
            return
        newest = np.array([self._newest[name] for name in _names(self.hidden).tolist()], np.int64)
        gone = self.table.find(newest) < 0
        if gone.any():
            self._pending.append(self.hidden.at(np.flatnonzero(gone)))
            self.hidden = self.hidden.at(np.flatnonzero(~gone))

    def _hide_copies(self, rows: Additions, names_of: Callable[[IntArray], IntArray]) -> Additions:
        """Hide the older copies among new and shown trajectories; return the new ones that are to be shown."""
        names = _names(rows)
        shown = self.table.ids_at(self.table.marked(marks_of(names)))
        names_shown = names_of(shown) if len(shown) else shown
        at = self.table.find(shown)  # only now: some may have left the table meanwhile
        shown, names_shown, at = shown[at >= 0], names_shown[at >= 0], at[at >= 0]
        stays = ~np.isin(rows.ids % MOST_STORES, np.array([*self._absent], np.int64))
        rows, names = (rows, names) if stays.all() else (rows.at(np.flatnonzero(stays)), names[stays])
        every_id = np.concatenate([shown, rows.ids])
        every_name = np.concatenate([names_shown, names])
        older = _with_later_copy(every_id, every_name)
        if not older.any():
            return rows
        copied = np.isin(every_name, every_name[older])
        for number, name in sorted(zip(every_id[copied].tolist(), every_name[copied].tolist(), strict=True)):
            self._newest[name] = number
        of_shown, of_new = older[: len(shown)], older[len(shown) :]
        lengths = self.table.samples[at[of_shown]].astype(np.int64)
        versions = np.zeros(len(lengths), np.int64)
        hidden = Additions(shown[of_shown], lengths, versions, names=every_name[: len(shown)][of_shown])
        self.hidden = Additions.joined([self.hidden, hidden, rows.at(np.flatnonzero(of_new))])
        if len(hidden):
            self._remove_at(at[of_shown])
        return rows.at(np.flatnonzero(~of_new))

    def inform(self, sampler: Sampler, described: Callable[[IntArray, bool], Additions]) -> bool:
        """Report additions and evictions to a sampler, in the order of ids.

        When older trajectories return (after a lost store or a rollback), all newer ones are removed and added again
        behind them. The sampler's state is kept.

        Args:
            sampler: the sampler.
            described: returns lengths, versions and names of shown trajectories, in the order of ids, and tasks if its
                second argument is true; it removes trajectories that are gone.

        Returns:
            False if trajectories were gone: nothing was reported, call again.
        """
        revision, ids = self.revision, self.ids
        fresh = described(ids[first_difference(sampler.ids, ids) :], sampler.needs_tasks)
        if self.revision != revision:
            return False
        rearrange(sampler, ids, lambda same: sampler.added(fresh) if len(fresh) else None)
        return True

    @property
    def absent(self) -> list[int]:
        """Ranks of the excluded stores."""
        return sorted(self._absent)

    def __len__(self) -> int:
        """Number of trajectories that can be drawn."""
        return len(self.table)

    @property
    def ids(self) -> IntArray:
        """Ids of the trajectories, ascending: oldest first; decoded for this call."""
        return self.table.ids

    def has(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each id whether its trajectory can be drawn."""
        there: npt.NDArray[np.bool_] = self.table.find(ids) >= 0
        return there

    def copies_of(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return the ids of the same trajectories in other stores, and for each its place in ``ids``; few have any.

        The ids may be of shown and of hidden copies.
        """
        name_of = dict(zip(self.hidden.ids.tolist(), _names(self.hidden).tolist(), strict=True))
        name_of |= {self._newest[name]: name for name in name_of.values()}
        ids_of: dict[int, list[int]] = {}
        for number, name in name_of.items():
            ids_of.setdefault(name, []).append(number)
        given = set(ids.tolist())
        found = [
            (number, place)
            for place, of in enumerate(ids.tolist())
            if of in name_of
            for number in sorted(ids_of[name_of[of]])
            if number not in given
        ]
        copies, places = np.array(found, np.int64).reshape(-1, 2).T
        return copies, places

    # -- drawing ----------------------------------------------------------------------------------

    def samples(self, count: int, window_size: int, draws: Draws) -> Drawn:
        """Draw samples of the newest trajectories, uniformly with replacement, as a buffer does.

        Raises:
            EmptyBufferError: there are no trajectories.
        """
        drawn = self.table.drawn(self.places(count, window_size, draws))
        return replace(drawn, probabilities=np.full(len(drawn), 1 / self._window(window_size).samples))

    def places(self, count: int, window_size: int, draws: Draws) -> IntArray:
        """Draw like :meth:`samples`; return numbers of samples in :attr:`table`."""
        window = self._window(window_size)
        drawn = draws.samples(window, count)
        return drawn + self.table.samples_before(window.first) if window.first else drawn

    def trajectories(self, count: int, window_size: int, draws: Draws) -> IntArray:
        """Draw ids of the newest trajectories, uniformly without replacement; all if ``count`` is larger.

        Raises:
            EmptyBufferError: there are no trajectories.
        """
        return self.table.ids_at(np.array(draws.trajectories(self._window(window_size), count), np.int64))

    def first_of(self, window_size: int) -> int | None:
        """Return the oldest id in a window of the newest trajectories; None if the window has all."""
        if not 0 < window_size < len(self):
            return None
        return int(self.table.ids_at(np.array([len(self) - window_size]))[0])

    def _window(self, size: int) -> Window:
        count = len(self)
        if not count:
            silent = f"; no answer from {listed(f'rank_{rank}' for rank in self.absent)}" if self._absent else ""
            raise EmptyBufferError(f"cannot sample: no store that answers has trajectories{silent}")
        first = max(0, count - size) if size else 0
        return Window(
            first, range(first, first), count, 0, 0, self.table.total_samples - self.table.samples_before(first)
        )


def _names(rows: Additions) -> IntArray:
    return np.zeros(len(rows), np.int64) if rows.names is None else rows.names


def _with_later_copy(ids: IntArray, names: IntArray) -> npt.NDArray[np.bool_]:
    """Return for each trajectory whether one with a higher id has the same name."""
    older = np.zeros(len(ids), np.bool_)
    ordered = np.sort(names)
    if np.any((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)):  # copies are rare
        order = np.lexsort((ids, names))
        older[order[:-1]] = (names[order[1:]] == names[order[:-1]]) & (names[order[1:]] != 0)
    return older
