"""Keeps a handle's index of the stores up to date, without waiting for silent stores."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions, Sampler
from trajstore.distributed import actors
from trajstore.distributed.routes import Routes
from trajstore.distributed.run_index import RunIndex
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import StoreUnreachableError, trajectories

logger = logging.getLogger(__name__)


class IndexSync:
    """Keeps an index up to date. Not thread-safe.

    Args:
        stores: the actors.
        routes: notified when stores answer; gives the time limit of a request.
        interval: seconds for which an answer is valid.
        refreshed: called after each refresh.
    """

    def __init__(
        self, stores: actors.Stores, routes: Routes, interval: float, refreshed: Callable[[], None] = lambda: None
    ) -> None:
        self.index = RunIndex()
        self._stores = stores
        self._routes = routes
        self._interval = interval
        self._refreshed = refreshed
        self._asked: dict[int, Any] = {}
        self._refreshed_at = -1e9
        self._informed: weakref.WeakKeyDictionary[Sampler, int] = weakref.WeakKeyDictionary()
        """Revision of the index that each sampler has."""

    def updated(self, sampler: Sampler | None) -> RunIndex:
        """Return the index, not older than the interval, and report changes to a sampler."""
        self.refresh(not len(self.index))
        while sampler is not None and self._informed.get(sampler) != self.index.revision:
            if self.index.inform(sampler, self.described):
                self._informed[sampler] = self.index.revision
        return self.index

    def described(self, ids: IntArray, tasks: bool = False) -> Additions:
        """Return lengths, versions and names of shown trajectories, as their stores report them.

        Trajectories that were evicted meanwhile, and stores that do not answer, leave the index.
        """
        ranks = ids % MOST_STORES
        places = {rank: np.flatnonzero(ranks == rank) for rank in np.unique(ranks).tolist()}
        asked = {rank: (ids[at], tasks) for rank, at in places.items()}
        answers, failed = self._stores.ask(asked, "described", self._routes.patience)
        for rank, error in failed.items():
            if not isinstance(error, StoreUnreachableError):
                raise error
            self.leave_out(rank, error)
        parts = list(answers.values())
        whole = Additions.joined(parts) if parts else Additions(ids[:0], ids[:0], ids[:0], [] if tasks else None)
        known = whole.at(np.argsort(whole.ids, kind="stable"))
        lacking = ids[~np.isin(ids, known.ids)]
        self.index.remove(lacking)
        return known

    def names_of(self, ids: IntArray) -> IntArray:
        """Return the first half of each trajectory's UUID; 0 if it cannot be drawn."""
        names = np.zeros(len(ids), np.int64)
        known = self.described(np.unique(ids[self.index.has(ids)]))
        if len(known) and known.names is not None:
            at = np.minimum(np.searchsorted(known.ids, ids), len(known) - 1)
            there: npt.NDArray[np.bool_] = known.ids[at] == ids
            names[there] = known.names[at[there]]
        return names

    def refresh(self, force: bool) -> None:
        """Request news from all stores, without waiting for those that were silent before.

        A store that may still assign ids below another store's gets the current clock with a second request. Then
        everything added before is settled.

        Args:
            force: ignore the interval since the last refresh.
        """
        if not force and time.monotonic() - self._refreshed_at < self._interval:
            return
        self._stores.look()
        for rank in self._stores.all_ranks:
            if rank not in self._asked:
                self._ask(rank)
        again = self._collect()
        self._stores.note(self.index.clock)
        again |= set(self.index.behind)
        for rank in sorted(again):
            self._ask(rank)
        if again:
            self._collect()
        self.index.show(self.names_of)
        self._refreshed_at = time.monotonic()
        self._refreshed()

    def _ask(self, rank: int) -> None:
        try:
            last = self.index.received(rank)
            self._asked[rank] = self._stores.submit(rank, "changes", *last, self._stores.clock)
        except StoreUnreachableError as error:
            self.leave_out(rank, error)

    def _collect(self) -> set[int]:
        """Take the answers; return the ranks of the stores to ask for everything."""
        again = set()
        waited = [answer for rank, answer in self._asked.items() if rank not in self.index.absent]
        if waited:
            actors.ray().wait(waited, num_returns=len(waited), timeout=self._routes.patience)
        for rank, answer in list(self._asked.items()):
            ready, _ = actors.ray().wait([answer], timeout=0)
            if not ready:
                self.leave_out(rank, TimeoutError(f"no answer for {self._routes.patience:g} s"))
                continue
            del self._asked[rank]
            try:
                news = actors.ray().get(answer)
            except actors.away() as error:
                self.leave_out(rank, error)
                continue
            self._routes.answered(rank)
            was_absent = rank in self.index.absent
            if not self.index.take(rank, news):
                again.add(rank)
            elif was_absent:
                logger.warning("store rank_%d of %r answers again", rank, self._stores.name)
        return again

    def leave_out(self, rank: int, error: Exception) -> None:
        """Exclude a store from draws until it answers again, with one warning."""
        self._stores.forget(rank)
        new = rank not in self.index.absent
        count = self.index.leave_out(rank)
        if new:
            logger.warning(
                "store rank_%d of %r does not answer (%s): %s",
                rank,
                self._stores.name,
                actors.first_line(error),
                _what_is_left_out(count, self.index.has_answered(rank)),
            )


def _what_is_left_out(count: int, answered: bool) -> str:
    """Return a sentence on the trajectories of a store that does not answer."""
    if not answered:
        return "until it does, draws omit its trajectories (number unknown)"
    if not count:
        return "it had no trajectories when it last answered, so draws lose nothing"
    return f"until it does, draws omit its {trajectories(count)}"
