"""One request in flight: filled, sent, and resent until a store has committed it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from trajstore.distributed.actors import Stores, away, first_line, ray
from trajstore.distributed.add_request import AddRequest, Piece, new_key
from trajstore.distributed.routes import Routes
from trajstore.errors import StoreUnreachableError, trajectories

logger = logging.getLogger(__name__)

_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class PendingRequest:
    """One request in flight. Not thread-safe.

    Args:
        stores: the actors.
        routes: chooses the store.
    """

    def __init__(self, stores: Stores, routes: Routes) -> None:
        self.nbytes = 0
        self.count = 0
        self.departed = False
        self.done = False
        """True once a store has answered that it has committed the request."""
        self.ids: Sequence[int] = []
        self.rank = -1
        self._stores = stores
        self._routes = routes
        self._key = new_key()
        self._pieces: list[Piece] = []
        self._request: Any = None
        self._answer: Any = None
        self._pause = _PAUSE
        self._not_before = 0.0
        self._since = 0.0
        """Time of the last answer of any store, or of the first call; start of the deadline."""
        self._turned = 0.0
        """The same for the current store; start of its patience."""
        self._sent = False
        """True if the current store may have received the request."""
        self._tried: set[int] = set()
        """Silent stores that may have received the request."""

    def fill(self, piece: Piece, count: int) -> range:
        """Add ``count`` packed trajectories before sending; return their places in the request."""
        self._pieces.append(piece)
        self.nbytes += piece.nbytes
        self.count += count
        return range(self.count - count, self.count)

    def depart(self) -> None:
        """Send the request unless already sent. After an exception it is unchanged; call again."""
        if self.departed:
            return
        self._request = ray().put(AddRequest(self._key, self._pieces))  # kept there until it is committed
        self._pieces = []
        self.rank = self._routes.next()
        self.departed = True
        self._since = self._turned = time.monotonic()
        self._submit()

    def copies(self) -> list[tuple[int, bytes, int]]:
        """Return rank, key and count for each other store that may have the request too, once it is committed."""
        return [(rank, self._key, self.count) for rank in sorted(self._tried - {self.rank}) if self.done]

    @property
    def answer(self) -> Any:
        """Reference of the pending call, or None."""
        return self._answer

    def take(self) -> None:
        """Process the answer that has arrived.

        Raises:
            StoreUnreachableError: no store has answered for the deadline. The request is kept; call again to retry.
            StoreWriteError: the store cannot write at present. The request is kept; call again to retry.
        """
        reference, self._answer = self._answer, None
        try:
            ids: Sequence[int] | None = ray().get(reference)
        except away() as error:
            self._lost(error)
            return
        self._since = self._turned = time.monotonic()
        self._pause = _PAUSE
        self._routes.answered(self.rank)
        if ids is not None:
            self.ids, self.done, self._request = ids, True, None
            self._stores.note(max(ids) + 1)

    def advance(self, until: float) -> bool:
        """Continue until the request is committed or the time is ``until`` (monotonic); return whether it is committed.

        Raises:
            StoreUnreachableError, StoreWriteError: see :meth:`take`.
        """
        self.depart()
        while not self.done:
            now = time.monotonic()
            if self._answer is None:
                if now < self._not_before:
                    if until <= self._not_before:
                        time.sleep(max(0.0, min(until - now, _PAUSE)))
                        return False
                    time.sleep(self._not_before - now)
                self._submit()
                continue
            patience = self._turned + self._routes.patience
            ready, _ = ray().wait([self._answer], timeout=max(0.0, min(until, max(patience, now + _PAUSE)) - now))
            if ready:
                self.take()
            elif time.monotonic() >= max(patience, now):
                self._lost(TimeoutError("no answer"))
            elif time.monotonic() >= until:
                return False
        return True

    def _submit(self) -> None:
        try:
            self._answer = self._stores.submit(self.rank, "add", self._request, self.count, self._stores.clock)
            self._sent = True
        except StoreUnreachableError as error:
            self._lost(error)

    def _lost(self, error: BaseException) -> None:
        """Schedule a retry; at another store if this one exceeded its patience or has not received the request."""
        self._answer = None
        now = time.monotonic()
        away_for = now - self._since
        self._stores.forget(self.rank)
        if away_for >= self._stores.deadline:
            self._since = self._turned = now  # the next call gets a new deadline
            raise self._stores.unreachable(self.rank, away_for, error) from error
        if now - self._turned >= self._routes.patience or not self._sent:
            elsewhere = self._routes.instead_of(self.rank)
            if elsewhere is not None:
                logger.warning(
                    "store rank_%d does not answer (%s): %s sent to rank_%d instead",
                    self.rank,
                    first_line(error),
                    trajectories(self.count),
                    elsewhere,
                )
                if self._sent:
                    self._tried.add(self.rank)
                self.rank = elsewhere
                self._turned, self._sent, self._pause, self._not_before = now, False, _PAUSE, now
                return
            self._routes.hopeful()  # all are silent: restart the patience of each, beginning with this one
            self._turned = now
        if self._pause == _PAUSE:
            logger.warning(
                "rank_%d does not answer (%s): %s sent again", self.rank, first_line(error), trajectories(self.count)
            )
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def take_arrived(pending: Iterable[PendingRequest]) -> None:
    """Process the answers that have arrived.

    Raises:
        StoreUnreachableError, StoreWriteError: see :meth:`PendingRequest.take`.
    """
    asked = {request.answer: request for request in pending if request.answer is not None}
    if asked:
        ready, _ = ray().wait(list(asked), num_returns=len(asked), timeout=0)
        for answer in ready:
            asked[answer].take()
