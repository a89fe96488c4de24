"""One parcel on its way: it is sent again until a store says that it has committed it."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

from trajstore.distributed.actors import Stores, away, first_line, ray
from trajstore.distributed.parcel import Parcel
from trajstore.distributed.routes import Routes
from trajstore.errors import StoreUnreachableError

logger = logging.getLogger(__name__)

Stage = Literal["adding", "committing", "done"]

_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_ASK_AGAIN = 5.0  # seconds that a store waits for a commit before it answers "not yet"


class Shipment:
    """One parcel on its way. Used by one thread at a time.

    Args:
        stores: where it may go.
        routes: chooses among them.
        parcel: what is sent; kept in Ray's object store until it is committed.
        count: trajectories in it.
    """

    def __init__(self, stores: Stores, routes: Routes, parcel: Parcel, count: int) -> None:
        self.nbytes = parcel.nbytes
        self.count = count
        self.stage: Stage = "adding"
        self.ids: list[int] = []
        self.rank = routes.next()
        self._stores = stores
        self._routes = routes
        self._key = parcel.key
        self._parcel: Any = ray().put(parcel)
        self._answer: Any = None
        self._pause = _PAUSE
        self._not_before = 0.0
        self._since = time.monotonic()
        """When the store last did anything for it."""
        self._submit()

    @property
    def queued(self) -> bool:
        """Whether a store has it, in memory at least."""
        return self.stage != "adding"

    def advance(self, until: float, stage: Stage) -> bool:
        """Go on until a stage is reached, or a moment (of the monotonic clock); return whether it is.

        Raises:
            StoreUnreachableError: no store has answered for the deadline. It is kept; call again to try again.
            StoreWriteError: the store cannot write at present. It is kept, here or there; call again to try again.
        """
        wanted = ("adding", "committing", "done").index(stage)
        while ("adding", "committing", "done").index(self.stage) < wanted:
            now = time.monotonic()
            if self._answer is None:
                if now < self._not_before:
                    if until <= self._not_before:
                        time.sleep(max(0.0, min(until - now, _PAUSE)))
                        return False
                    time.sleep(self._not_before - now)
                self._submit()
                continue
            patience = self._since + self._routes.patience
            ready, _ = ray().wait([self._answer], timeout=max(0.0, min(until, max(patience, now + _PAUSE)) - now))
            if ready:
                self._take(ready[0])
            elif time.monotonic() >= until:
                return False
            elif time.monotonic() >= patience:
                self._lost(TimeoutError("no answer"))
        return True

    def _submit(self) -> None:
        try:
            if self.stage == "adding":
                self._answer = self._stores.submit(self.rank, "add", self._parcel, self.count, self._stores.clock)
            else:
                self._answer = self._stores.submit(self.rank, "committed", self._key, self.count, _ASK_AGAIN)
        except StoreUnreachableError as error:
            self._lost(error)

    def _take(self, answer: Any) -> None:
        self._answer = None
        try:
            value = ray().get(answer)
        except away() as error:
            self._lost(error)
            return
        self._since = time.monotonic()
        self._pause = _PAUSE
        if self.stage == "adding":
            self.ids, self.stage = value, "committing"
            self._stores.note(max(value, default=-1) + 1)
        elif value is None:
            logger.warning("rank_%d began anew before it committed %d trajectories; sent again", self.rank, self.count)
            self.stage = "adding"
        elif value:
            self.stage, self._parcel = "done", None
            self._routes.answered(self.rank)

    def _lost(self, error: BaseException) -> None:
        """Try again a little later; elsewhere if the store is away for long."""
        self._answer = None
        now = time.monotonic()
        away_for = now - self._since
        self._stores.forget(self.rank)
        if away_for >= self._stores.deadline:
            self._since = now  # the next call tries for as long again
            raise self._stores.unreachable(self.rank, away_for, error) from error
        if away_for >= self._routes.patience:
            elsewhere = self._routes.instead_of(self.rank)
            if elsewhere is not None:
                logger.warning(
                    "store rank_%d does not answer (%s); %d trajectories go to rank_%d",
                    self.rank,
                    first_line(error),
                    self.count,
                    elsewhere,
                )
                self.rank, self.stage = elsewhere, "adding"
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
