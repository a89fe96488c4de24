"""Fetches news from the stores of a buffer without waiting for silent ones."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from trajstore._core.sampling.base import Sampler
from trajstore.distributed import actors
from trajstore.distributed.census import Census
from trajstore.distributed.routes import Routes
from trajstore.errors import StoreUnreachableError, trajectories

logger = logging.getLogger(__name__)


class Survey:
    """Keeps a census up to date. Not thread-safe.

    Args:
        stores: the actors.
        routes: notified when stores answer; gives the time limit of a request.
        interval: seconds for which an answer is valid.
        refreshed: called after each refresh.
    """

    def __init__(
        self, stores: actors.Stores, routes: Routes, interval: float, refreshed: Callable[[], None] = lambda: None
    ) -> None:
        self.census = Census()
        self._stores = stores
        self._routes = routes
        self._interval = interval
        self._refreshed = refreshed
        self._needs_tasks = False
        self._asked: dict[int, Any] = {}
        self._looked = -1e9
        self._told: weakref.WeakKeyDictionary[Sampler, int] = weakref.WeakKeyDictionary()

    def look(self, sampler: Sampler | None) -> Census:
        """Return the census, not older than the interval, and report changes to a sampler."""
        if sampler is not None and sampler.needs_tasks and not self._needs_tasks:
            self._needs_tasks, self.census = True, Census()
            self._asked.clear()
            self._told.clear()
        self.refresh(not len(self.census))
        if sampler is not None and self._told.get(sampler) != self.census.revision:
            self.census.inform(sampler)
            self._told[sampler] = self.census.revision
        return self.census

    def refresh(self, force: bool) -> None:
        """Request news from all stores, without waiting for those that were silent before.

        A store that may still assign ids below another store's gets the current clock with a second request. Then
        everything added before is settled.

        Args:
            force: ignore the interval since the last refresh.
        """
        if not force and time.monotonic() - self._looked < self._interval:
            return
        self._stores.look()
        for rank in self._stores.all_ranks:
            if rank not in self._asked:
                self._ask(rank)
        self._collect()
        self._stores.note(self.census.clock)
        behind = self.census.behind
        for rank in behind:
            self._ask(rank)
        if behind:
            self._collect()
        self._looked = time.monotonic()
        self._refreshed()

    def _ask(self, rank: int) -> None:
        try:
            heard = self.census.heard(rank)
            self._asked[rank] = self._stores.submit(rank, "news", *heard, self._needs_tasks, self._stores.clock)
        except StoreUnreachableError as error:
            self.leave_out(rank, error)

    def _collect(self) -> None:
        waited = [answer for rank, answer in self._asked.items() if rank not in self.census.absent]
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
            if rank in self.census.absent:
                logger.warning("store rank_%d of %r answers again", rank, self._stores.name)
            self.census.take(rank, news)
            self._routes.answered(rank)

    def leave_out(self, rank: int, error: Exception) -> None:
        """Exclude a store from draws until it answers again, with one warning."""
        self._stores.forget(rank)
        new = rank not in self.census.absent
        count = self.census.leave_out(rank)
        if new:
            logger.warning(
                "store rank_%d of %r does not answer (%s): %s",
                rank,
                self._stores.name,
                actors.first_line(error),
                _what_is_left_out(count, self.census.heard(rank)[1] >= 0),
            )


def _what_is_left_out(count: int, heard: bool) -> str:
    """Return a sentence on the trajectories of a store that does not answer."""
    if not heard:
        return "until it does, draws omit its trajectories (number unknown)"
    if not count:
        return "it had no trajectories when it last answered, so draws lose nothing"
    return f"until it does, draws omit its {trajectories(count)}"
