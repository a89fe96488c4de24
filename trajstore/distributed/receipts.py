"""Receipts for trajectories in flight, and the outbox of a handle."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from trajstore._core.base import locks
from trajstore._core.base.interrupts import start_thread
from trajstore._core.buffer.content_watch import ContentWatch
from trajstore._core.columns.flat import FlatTrajectories, cut
from trajstore._core.columns.memory import Arena
from trajstore.distributed.actors import Stores, away, first_line, ray
from trajstore.distributed.add_request import pack
from trajstore.distributed.options import HandleOptions
from trajstore.distributed.pending_request import PendingRequest, take_arrived
from trajstore.distributed.routes import Routes
from trajstore.errors import ConfigurationError, StoreUnreachableError, trajectories

logger = logging.getLogger(__name__)

REQUEST_BYTES = 8 << 20
"""Maximum size of a request, unless one trajectory is larger."""

_HOPE = 10.0  # seconds between attempts to reach silent stores
_TOGETHER = 0.05  # seconds for which a request waits for more trajectories, as in a writer for a shard
_LOOK = 1.0  # longest single wait for an answer, in seconds


class Receipt:
    """Progress of one ``add_trajectories``."""

    def __init__(self, parts: Sequence[tuple[PendingRequest, range]], lock: locks.Lock) -> None:
        self._parts = parts
        self._lock = lock

    def __len__(self) -> int:
        """Number of trajectories."""
        return sum(len(places) for _, places in self._parts)

    def committed(self, timeout: float | None = None) -> list[int]:
        """Wait until the trajectories survive the kill of any process; return their ids in the order of the list.

        Raises:
            TimeoutError: ``timeout`` seconds passed.
            StoreUnreachableError: no store has answered for the handle's deadline; call again to continue.
            StoreWriteError: a store cannot write at present.
        """
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        with self._lock:
            for request, _ in self._parts:
                request.depart()
        for request, _ in self._parts:
            while True:
                with self._lock:
                    if request.advance(0.0):
                        break
                    answer = request.answer
                left = until - time.monotonic()
                if left <= 0:
                    behind = sum(len(places) for part, places in self._parts if not part.done)
                    raise TimeoutError(f"{behind} of {trajectories(len(self))} not committed after {timeout} s")
                _wait(answer, min(left, _LOOK))
        return [request.ids[place] for request, places in self._parts for place in places]

    @property
    def done(self) -> bool:
        """True if the trajectories are known to be committed; sends no request.

        Raises:
            StoreUnreachableError, StoreWriteError: see :meth:`committed`.
        """
        with self._lock:
            take_arrived([request for request, _ in self._parts])
            return all(request.done for request, _ in self._parts)


def _wait(answer: Any, seconds: float) -> None:
    """Wait for an answer; without a pending call, sleep briefly before the next attempt."""
    if answer is None:
        time.sleep(min(seconds, _TOGETHER))
    else:
        ray().wait([answer], timeout=seconds)


class Outbox:
    """The requests that a handle has sent and that are not known to be committed. Thread-safe.

    Trajectories added within a short time share a request, as sending one costs as much as storing hundreds of small
    trajectories.

    Args:
        stores: the actors.
        routes: chooses the store of each request.
        options: limits of the bytes in flight.
    """

    def __init__(self, stores: Stores, routes: Routes, options: HandleOptions) -> None:
        self._stores = stores
        self._routes = routes
        self._options = options
        self._content = ContentWatch()
        self._arena = Arena(REQUEST_BYTES)
        self._lock = locks.rlock("Outbox._lock")
        self._under_way: deque[PendingRequest] = deque()
        self._timer: threading.Timer | None = None
        self._departed = -1e9
        self._hoped = time.monotonic()
        self._asked: dict[int, Any] = {}
        """Pending probes of silent stores. A request as a probe would wait for its patience."""
        self._copies: dict[tuple[int, bytes, int], Any] = {}
        """Copies of committed requests in stores that were silent, with the pending call that removes each."""

    def send(self, runs: Sequence[FlatTrajectories]) -> Receipt:
        """Queue trajectories for sending; waits while ``max_pending_bytes`` are in flight.

        Raises:
            StoreUnreachableError, StoreWriteError: trajectories sent earlier cannot be stored at present.
        """
        parts = []
        with self._lock:
            self._ask_silent()
            for part, nbytes in cut(runs, REQUEST_BYTES):
                self._make_room(nbytes)
                parts.append(self._fill(part, nbytes))
            if parts:
                self._dispatch()
        return Receipt(parts, self._lock)

    def _ask_silent(self) -> None:
        """Collect answers of silent stores, and probe the others again every ``_HOPE`` seconds."""
        if self._asked:
            ready, _ = ray().wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
            for rank, answer in list(self._asked.items()):
                if answer in ready:
                    del self._asked[rank]
                    self._hear(rank, answer)
        if time.monotonic() - self._hoped < _HOPE:
            return
        self._hoped = time.monotonic()
        self._remove_copies()
        for rank in self._routes.silent:
            self._stores.forget(rank)  # the actor may have been replaced
            try:
                self._asked[rank] = self._stores.submit(rank, "describe")
            except StoreUnreachableError as error:
                logger.info("%s", error)

    def _remove_copies(self) -> None:
        """Let stores that were silent forget requests that another one has committed, and ask them until they have."""
        lost: tuple[type[Exception], ...] = (StoreUnreachableError, *away())
        for copy, answer in list(self._copies.items()):
            if answer is not None and not ray().wait([answer], timeout=0)[0]:
                continue
            rank, key, count = copy
            try:
                if answer is not None:
                    ray().get(answer)
                    del self._copies[copy]
                else:
                    self._copies[copy] = self._stores.submit(rank, "disown", key, count)
            except lost as error:
                logger.info("rank_%d still has a copy of %s: %s", rank, trajectories(count), first_line(error))
                self._copies[copy] = None
                self._stores.forget(rank)

    def _hear(self, rank: int, answer: Any) -> None:
        try:
            ray().get(answer)
        except away() as error:
            logger.info("store rank_%d still does not answer: %s", rank, first_line(error))
        else:
            self._routes.answered(rank)

    def _fill(self, runs: Sequence[FlatTrajectories], nbytes: int) -> tuple[PendingRequest, range]:
        """Add trajectories to the open request, or to a new one if they do not fit."""
        piece, copies = pack(runs, self._arena)
        self._content.look(copies)
        count = sum(map(len, runs))
        last = self._under_way[-1] if self._under_way else None
        if last is not None and not last.departed:
            if last.nbytes + nbytes <= REQUEST_BYTES:
                return last, last.fill(piece, count)
            self._depart(last)
        request = PendingRequest(self._stores, self._routes)
        places = request.fill(piece, count)
        self._under_way.append(request)  # last, so that an empty request is never sent
        return request, places

    def _dispatch(self) -> None:
        """Send the newest request, or schedule it shortly."""
        pause = self._departed + _TOGETHER - time.monotonic()
        if pause <= 0:
            self._depart(self._under_way[-1])
        elif self._timer is None:
            timer = threading.Timer(pause, self._time_is_up)
            timer.daemon = True  # must not delay process exit; unsent trajectories are reported then
            try:
                start_thread(timer)
            except RuntimeError:  # interpreter shutdown, or no memory for a thread
                self._depart(self._under_way[-1])
            else:
                self._timer = timer

    def _depart(self, request: PendingRequest) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        request.depart()
        self._departed = time.monotonic()

    def _time_is_up(self) -> None:
        from ray.exceptions import RayError

        with self._lock:
            if self._timer is None or self._timer is not threading.current_thread():
                return  # already sent; this timer is obsolete
            try:
                self._depart(self._under_way[-1])
            except (RayError, ConfigurationError, StoreUnreachableError) as error:
                logger.warning("trajectories are not sent yet (%s); the next call tries again", first_line(error))

    def _make_room(self, nbytes: int) -> None:
        self._look()
        while (
            self._under_way
            and sum(request.nbytes for request in self._under_way) + nbytes > self._options.max_pending_bytes
        ):
            if self._under_way[0].advance(time.monotonic() + _LOOK):
                self._forget_done()

    def _look(self) -> None:
        """Process the answers that have arrived."""
        take_arrived(self._under_way)
        self._forget_done()

    def _forget_done(self) -> None:
        done = [request for request in self._under_way if request.done]
        self._under_way = deque(request for request in self._under_way if not request.done)
        if copies := {copy: None for request in done for copy in request.copies()}:
            self._copies |= copies
            self._remove_copies()

    def flush(self, timeout: float | None) -> None:
        """Wait until everything sent is committed.

        Raises:
            TimeoutError, StoreUnreachableError, StoreWriteError: see :meth:`Receipt.committed`.
        """
        with self._lock:
            under_way = [(request, range(request.count)) for request in self._under_way]
        Receipt(under_way, self._lock).committed(timeout)
        with self._lock:
            self._forget_done()

    @property
    def requests(self) -> int:
        """Number of requests that are not known to be committed."""
        return sum(not request.done for request in self._under_way)

    @property
    def trajectories(self) -> int:
        """Number of trajectories that are not known to be committed."""
        return sum(request.count for request in self._under_way if not request.done)
