"""What all stores together hold, as one handle knows it; draws are made here, without asking anybody. Pure; no I/O.

Ids say what is newer: see "Ids are clocks" in docs/design/many-machines.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajstore.core.sampling.base import Additions, Drawn, IntArray, Sampler
from trajstore.core.sampling.draws import Draws, Window
from trajstore.distributed.listing import Listing
from trajstore.distributed.roll import News, joined, taken, without
from trajstore.errors import EmptyBufferError, listed

_EMPTY = np.zeros(0, np.int64)
_NONE = Additions(_EMPTY, _EMPTY, _EMPTY, [], _EMPTY)


class Census:
    """The trajectories of the stores that answer, in the order of their ids, the oldest first.

    Only what is *settled* is shown: ids below those that any store may still give out. So what is shown first is older
    than all that is shown later, whichever store has it. Of a trajectory that lies in two stores, because its parcel
    was sent again to another one, the newer copy is shown.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Additions]] = {}
        self._heard: dict[int, News] = {}
        self._absent: set[int] = set()
        self._table: Additions | None = None
        self._listing = Listing(_EMPTY, _EMPTY, _EMPTY)
        self._copies = _NONE
        self._settled = 0
        self.revision = 0

    def heard(self, rank: int) -> tuple[str, int]:
        """Return how far a store has told, see :class:`News`."""
        news = self._heard.get(rank)
        return ("", -1) if news is None else (news.began, news.cursor)

    @property
    def clock(self) -> int:
        """The highest of the ids that stores were about to give out when they told it."""
        return max((news.next_id for news in self._heard.values()), default=0)

    @property
    def behind(self) -> list[int]:
        """Ranks of the stores that may still give out an id below :attr:`clock`: until they are told of it."""
        clock = self.clock
        return [rank for rank, news in self._heard.items() if rank not in self._absent and news.next_id < clock]

    def take(self, rank: int, news: News) -> None:
        """Take in what a store has told."""
        parts = self._parts.setdefault(rank, [])
        if news.whole:
            parts.clear()
        for change in news.changes:
            if isinstance(change, Additions):
                parts.append(change)
            elif parts:
                parts[:] = [without(joined(parts), change)]
        if news.whole or news.changes or rank in self._absent:
            self._changed()
        self._absent.discard(rank)
        self._heard[rank] = News(news.began, news.cursor, False, next_id=news.next_id)
        self._settle()

    def leave_out(self, rank: int) -> int:
        """Draw no more from a store until it tells something again; return how many trajectories that leaves out."""
        if rank in self._absent:
            return 0
        self._absent.add(rank)
        self._changed()
        self._settle()
        return self.count(rank)

    def _settle(self) -> None:
        """Show what no store can give out an older id than any more; nothing that was shown is hidden again."""
        given = [news.next_id for rank, news in self._heard.items() if rank not in self._absent]
        settled = max(self._settled, min(given, default=0))
        if settled > self._settled:
            self._settled = settled
            self._changed()

    def count(self, rank: int) -> int:
        """Return the number of trajectories that a store has told of."""
        return sum(len(part) for part in self._parts.get(rank, ()))

    @property
    def absent(self) -> list[int]:
        """Ranks of the stores that are left out."""
        return sorted(self._absent)

    def __len__(self) -> int:
        """Number of trajectories that can be drawn."""
        return len(self._rows())

    @property
    def ids(self) -> IntArray:
        """Their ids, ascending: the oldest first."""
        return self._rows().ids

    @property
    def total_samples(self) -> int:
        """Their samples, T·B summed."""
        ends = self.listing.ends
        return int(ends[-1]) if len(ends) else 0

    def has(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether each of these trajectories can be drawn."""
        return _lie_in(ids, self.ids)

    def names_of(self, ids: IntArray) -> IntArray:
        """Return the first half of the UUID of some trajectories; 0 for those that cannot be drawn."""
        rows, found = self._rows(), np.zeros(len(ids), np.int64)
        there = self.has(ids)
        if rows.names is not None:
            found[there] = rows.names[np.searchsorted(rows.ids, ids[there])]
        return found

    def copies_of(self, ids: IntArray) -> IntArray:
        """Return the ids under which other stores have these trajectories, too; those are not shown."""
        self._rows()
        if not len(self._copies) or self._copies.names is None:
            return self._copies.ids
        return self._copies.ids[np.isin(self._copies.names, self.names_of(ids))]

    # -- drawing ----------------------------------------------------------------------------------

    def samples(self, count: int, window_size: int, draws: Draws) -> Drawn:
        """Draw samples of the newest trajectories, uniformly with replacement, as a buffer does.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        return self.listing.drawn(self.places(count, window_size, draws))

    def places(self, count: int, window_size: int, draws: Draws) -> IntArray:
        """Draw samples as :meth:`samples` does; they are told by their places in :attr:`listing`."""
        window = self._window(window_size)
        drawn = draws.samples(window, count)
        return drawn + self._before(window.first) if window.first else drawn

    @property
    def listing(self) -> Listing:
        """What can be drawn; the same object until something is new."""
        self._rows()
        return self._listing

    def trajectories(self, count: int, window_size: int, draws: Draws) -> IntArray:
        """Draw from the newest trajectories, uniformly, none twice; all if ``count`` is larger. Return their ids.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        chosen: IntArray = self.ids[draws.trajectories(self._window(window_size), count)]
        return chosen

    def first_of(self, window_size: int) -> int | None:
        """Return the id of the oldest of the newest trajectories; None where these are all."""
        ids = self.ids
        return int(ids[-window_size]) if 0 < window_size < len(ids) else None

    def _window(self, size: int) -> Window:
        count = len(self)
        if not count:
            silent = f"; no answer from {listed(f'rank_{rank}' for rank in self.absent)}" if self._absent else ""
            raise EmptyBufferError(f"cannot sample: no store that answers has a trajectory{silent}")
        first = max(0, count - size) if size else 0
        return Window(first, range(first, first), count, 0, 0, self.total_samples - self._before(first))

    def _before(self, position: int) -> int:
        return int(self.listing.ends[position - 1]) if position else 0

    # -- samplers ---------------------------------------------------------------------------------

    def tell(self, sampler: Sampler) -> None:
        """Tell a sampler of what can be drawn now, in the order of ids.

        Where older trajectories come back (a store that was lost, a rollback), those that the sampler has beyond them
        are told again behind them, and its state is kept.
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
            sampler.added(taken(rows, fresh))
            return
        state = sampler.state_dict()
        sampler.evicted(known[known > rows.ids[first]])
        sampler.added(taken(rows, np.arange(first, len(rows))))
        sampler.load_state_dict(state)

    def _rows(self) -> Additions:
        if self._table is None:
            parts = [part for rank, told in self._parts.items() if rank not in self._absent for part in told]
            whole = joined(parts) if parts else _NONE
            order = np.argsort(whole.ids, kind="stable")
            settled = taken(whole, order[whole.ids[order] < self._settled])
            again = _again(settled)
            self._copies = taken(settled, np.flatnonzero(again))
            self._table = taken(settled, np.flatnonzero(~again)) if again.any() else settled
            self._listing = Listing(self._table.ids, self._table.samples, np.cumsum(self._table.samples))
        return self._table

    def _changed(self) -> None:
        self._table = None
        self.revision += 1


def _again(rows: Additions) -> npt.NDArray[np.bool_]:
    """Return which rows have a copy further on."""
    found = np.zeros(len(rows), np.bool_)
    names = rows.names
    if names is None or not len(names):
        return found
    ordered = np.sort(names)
    if np.any((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)):  # else, nearly always, nothing more is to be done
        _, last = np.unique(names[::-1], return_index=True)
        found[:] = names != 0
        found[len(names) - 1 - last] = False
    return found


def _lie_in(ids: IntArray, ascending: IntArray) -> npt.NDArray[np.bool_]:
    """Return whether each id is one of some ascending ones."""
    if not len(ascending):
        return np.zeros(len(ids), np.bool_)
    at = np.searchsorted(ascending, ids)
    found: npt.NDArray[np.bool_] = ascending[np.minimum(at, len(ascending) - 1)] == ids
    return found
