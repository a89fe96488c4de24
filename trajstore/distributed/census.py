"""The trajectories of all stores, as one handle knows them; draws need no request. Pure; no I/O.

Ids order trajectories by age: see "Ids are clocks" in docs/design/many-machines.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions, Drawn, Sampler
from trajstore._core.sampling.draws import Draws, Window
from trajstore.distributed.listing import Listing
from trajstore.distributed.roll import News, without
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import EmptyBufferError, listed

_EMPTY = np.zeros(0, np.int64)
_NONE = Additions(_EMPTY, _EMPTY, _EMPTY, [], _EMPTY)


class Census:
    """The trajectories of the responsive stores, ordered by id, oldest first.

    Only *settled* trajectories are shown: those with ids below every id that a store may still assign. So a
    trajectory shown earlier is always older than one shown later, whichever store has it. When a resent parcel leaves
    a trajectory in two stores, the newer copy is shown.
    """

    def __init__(self) -> None:
        self._all = _NONE
        """The trajectories of all stores, ordered by id; without those of :attr:`_fresh`."""
        self._fresh: list[Additions] = []
        self._heard: dict[int, News] = {}
        self._absent: set[int] = set()
        self._table: Additions | None = None
        self._listing = Listing(_EMPTY, _EMPTY, _EMPTY)
        self._copies = _NONE
        self._settled = 0
        self.revision = 0

    def heard(self, rank: int) -> tuple[str, int]:
        """Return ``began`` and ``cursor`` of a store's last :class:`News`."""
        news = self._heard.get(rank)
        return ("", -1) if news is None else (news.began, news.cursor)

    @property
    def clock(self) -> int:
        """The highest ``next_id`` that the stores have reported."""
        return max((news.next_id for news in self._heard.values()), default=0)

    @property
    def behind(self) -> list[int]:
        """Ranks of the stores that may still assign an id below :attr:`clock`, as they have not received it yet."""
        clock = self.clock
        return [rank for rank, news in self._heard.items() if rank not in self._absent and news.next_id < clock]

    def take(self, rank: int, news: News) -> None:
        """Apply a store's changes."""
        if news.whole:
            self._join()
            if self.count(rank):
                self._all = self._all.at(np.flatnonzero(self._all.ids % MOST_STORES != rank))
        for change in news.changes:
            if isinstance(change, Additions):
                self._fresh.append(change)
            else:
                self._join()
                self._all = without(self._all, change)
        if news.whole or news.changes or rank in self._absent:
            self._changed()
        self._absent.discard(rank)
        self._heard[rank] = News(news.began, news.cursor, False, next_id=news.next_id)
        self._settle()

    def leave_out(self, rank: int) -> int:
        """Exclude a store from draws until its next news; return the number of trajectories excluded."""
        if rank in self._absent:
            return 0
        self._absent.add(rank)
        self._changed()
        self._settle()
        return self.count(rank)

    def _settle(self) -> None:
        """Raise the id below which trajectories are shown; it never falls."""
        given = [news.next_id for rank, news in self._heard.items() if rank not in self._absent]
        settled = max(self._settled, min(given, default=0))
        if settled > self._settled:
            self._settled = settled
            self._changed()

    def count(self, rank: int) -> int:
        """Return the number of trajectories that a store has reported."""
        self._join()
        return int(np.count_nonzero(self._all.ids % MOST_STORES == rank))

    def _join(self) -> None:
        if self._fresh:
            whole = Additions.joined([self._all, *self._fresh])
            self._fresh.clear()
            if np.any(whole.ids[1:] < whole.ids[:-1]):
                whole = whole.at(np.argsort(whole.ids, kind="stable"))
            self._all = whole

    @property
    def absent(self) -> list[int]:
        """Ranks of the excluded stores."""
        return sorted(self._absent)

    def __len__(self) -> int:
        """Number of trajectories that can be drawn."""
        return len(self._rows())

    @property
    def ids(self) -> IntArray:
        """Ids of the trajectories, ascending: oldest first."""
        return self._rows().ids

    @property
    def total_samples(self) -> int:
        """Number of samples of the trajectories, T·B summed."""
        ends = self.listing.ends
        return int(ends[-1]) if len(ends) else 0

    def has(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each id whether its trajectory can be drawn."""
        return _lie_in(ids, self.ids)

    def names_of(self, ids: IntArray) -> IntArray:
        """Return the first half of each trajectory's UUID; 0 if it cannot be drawn."""
        rows, names = self._rows(), np.zeros(len(ids), np.int64)
        there = self.has(ids)
        if rows.names is not None:
            names[there] = rows.names[np.searchsorted(rows.ids, ids[there])]
        return names

    @property
    def hidden(self) -> IntArray:
        """Ids of the trajectories of which another store has a newer copy."""
        self._rows()
        return self._copies.ids

    def copies_of(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return the ids of the same trajectories in other stores, and for each its place in ``ids``; few have any.

        The ids may be of shown and of hidden copies.
        """
        rows, hidden = self._rows(), self._copies
        if not len(hidden) or rows.names is None or hidden.names is None:
            return _EMPTY, _EMPTY
        shown = np.isin(rows.names, hidden.names)
        name_of: dict[int, int] = {}
        ids_of: dict[int, list[int]] = {}
        for known, names in ((rows.ids[shown], rows.names[shown]), (hidden.ids, hidden.names)):
            for number, name in zip(known.tolist(), names.tolist(), strict=True):
                name_of[number] = name
                ids_of.setdefault(name, []).append(number)
        given = set(ids.tolist())
        found = [
            (number, place)
            for place, of in enumerate(ids.tolist())
            for number in ids_of.get(name_of.get(of, 0), ())
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
        drawn = self.listing.drawn(self.places(count, window_size, draws))
        return replace(drawn, probabilities=np.full(len(drawn), 1 / self._window(window_size).samples))

    def places(self, count: int, window_size: int, draws: Draws) -> IntArray:
        """Draw like :meth:`samples`; return positions in :attr:`listing`."""
        window = self._window(window_size)
        drawn = draws.samples(window, count)
        return drawn + self._before(window.first) if window.first else drawn

    @property
    def listing(self) -> Listing:
        """The trajectories that can be drawn; the same object until they change."""
        self._rows()
        return self._listing

    def trajectories(self, count: int, window_size: int, draws: Draws) -> IntArray:
        """Draw ids of the newest trajectories, uniformly without replacement; all if ``count`` is larger.

        Raises:
            EmptyBufferError: there are no trajectories.
        """
        chosen: IntArray = self.ids[draws.trajectories(self._window(window_size), count)]
        return chosen

    def first_of(self, window_size: int) -> int | None:
        """Return the oldest id in a window of the newest trajectories; None if the window has all."""
        ids = self.ids
        return int(ids[-window_size]) if 0 < window_size < len(ids) else None

    def _window(self, size: int) -> Window:
        count = len(self)
        if not count:
            silent = f"; no answer from {listed(f'rank_{rank}' for rank in self.absent)}" if self._absent else ""
            raise EmptyBufferError(f"cannot sample: no store that answers has trajectories{silent}")
        first = max(0, count - size) if size else 0
        return Window(first, range(first, first), count, 0, 0, self.total_samples - self._before(first))

    def _before(self, position: int) -> int:
        return int(self.listing.ends[position - 1]) if position else 0

    # -- samplers ---------------------------------------------------------------------------------

    def inform(self, sampler: Sampler) -> None:
        """Report additions and evictions to a sampler, in the order of ids.

        When older trajectories return (after a lost store or a rollback), all newer ones are removed and added again
        behind them. The sampler's state is kept.
        """
        rows, known = self._rows(), sampler.ids
        gone = known[~_lie_in(known, rows.ids)]
        if len(gone):
            sampler.evicted(gone)
            known = known[_lie_in(known, rows.ids)]
        fresh = np.flatnonzero(~_lie_in(rows.ids, np.sort(known)))
        if not len(fresh):
            return
        first = int(fresh[0])
        if not len(known) or rows.ids[first] > known.max():
            sampler.added(rows.at(fresh))
            return
        state = sampler.state_dict()
        sampler.evicted(known[known > rows.ids[first]])
        sampler.added(rows.at(np.arange(first, len(rows))))
        sampler.load_state_dict(state)

    def _rows(self) -> Additions:
        if self._table is None:
            self._join()
            settled = self._all
            if self._absent or (len(settled) and settled.ids[-1] >= self._settled):
                present = ~np.isin(settled.ids % MOST_STORES, list(self._absent))
                settled = settled.at(np.flatnonzero(present & (settled.ids < self._settled)))
            again = _again(settled)
            self._copies = settled.at(np.flatnonzero(again))
            self._table = settled.at(np.flatnonzero(~again)) if again.any() else settled
            self._listing = Listing(self._table.ids, self._table.samples, np.cumsum(self._table.samples))
        return self._table

    def _changed(self) -> None:
        self._table = None
        self.revision += 1


def _again(rows: Additions) -> npt.NDArray[np.bool_]:
    """Return for each row whether a later row is its copy."""
    has_copy = np.zeros(len(rows), np.bool_)
    names = rows.names
    if names is None or not len(names):
        return has_copy
    ordered = np.sort(names)
    if np.any((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)):  # copies are rare
        _, last = np.unique(names[::-1], return_index=True)
        has_copy[:] = names != 0
        has_copy[len(names) - 1 - last] = False
    return has_copy


def _lie_in(ids: IntArray, ascending: IntArray) -> npt.NDArray[np.bool_]:
    """Return for each id whether it occurs in ``ascending``."""
    if not len(ascending):
        return np.zeros(len(ids), np.bool_)
    at = np.searchsorted(ascending, ids)
    occurs: npt.NDArray[np.bool_] = ascending[np.minimum(at, len(ascending) - 1)] == ids
    return occurs
