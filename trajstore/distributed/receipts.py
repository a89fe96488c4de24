"""What a producer holds of trajectories on their way, and all that a handle has sent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from trajstore.core.base import locks
from trajstore.core.base.interrupts import start_thread
from trajstore.core.columns.flat import FlatTrajectory
from trajstore.core.columns.memory import Arena
from trajstore.distributed.actors import Stores, away, first_line, ray
from trajstore.distributed.options import HandleOptions
from trajstore.distributed.parcel import split
from trajstore.distributed.routes import Routes
from trajstore.distributed.shipment import Shipment, Stage, Watermarks
from trajstore.errors import ConfigurationError, StoreUnreachableError

logger = logging.getLogger(__name__)

PARCEL_BYTES = 8 << 20
"""Most bytes that are sent at once, unless one trajectory has more."""

_HOPE = 10.0  # seconds after which silent stores are tried again
_TOGETHER = 0.05  # seconds that trajectories may wait for others to share their parcel, as in a writer for a shard
_LOOK = 1.0  # seconds after which whoever waits for an answer looks at the clock


class Receipt:
    """Of one ``add_trajectories``: says when the trajectories are in a store, and when they survive a crash."""

    def __init__(self, parts: Sequence[tuple[Shipment, range]], lock: locks.Lock) -> None:
        self._parts = parts
        self._lock = lock

    def __len__(self) -> int:
        """Number of trajectories."""
        return sum(len(places) for _, places in self._parts)

    def queued(self, timeout: float | None = None) -> list[int]:
        """Wait until stores hold the trajectories in memory, and return their ids, in the order of the list.

        A store that is killed now loses them; they are sent again, and have other ids then.

        Raises:
            TimeoutError: ``timeout`` seconds passed.
            StoreUnreachableError: no store has answered for the handle's deadline; call again to go on trying.
            StoreWriteError: a store cannot write at present.
        """
        return self._reach("committing", timeout)

    def committed(self, timeout: float | None = None) -> list[int]:
        """Wait until the trajectories survive the kill of any process, and return their final ids.

        Raises:
            TimeoutError, StoreUnreachableError, StoreWriteError: as by :meth:`queued`.
        """
        return self._reach("done", timeout)

    @property
    def done(self) -> bool:
        """Whether the trajectories are known to be committed; asks nobody."""
        with self._lock:
            return all(shipment.reached("done") for shipment, _ in self._parts)

    def _reach(self, stage: Stage, timeout: float | None) -> list[int]:
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        with self._lock:
            for shipment, _ in self._parts:
                shipment.depart()
        for shipment, _ in reversed(self._parts):  # what the newest is told is mostly true of the others, too
            while True:
                with self._lock:
                    if shipment.advance(0.0, stage):
                        break
                    answer = shipment.answer
                left = until - time.monotonic()
                if left <= 0:
                    behind = sum(len(places) for part, places in self._parts if part.stage != "done")
                    raise TimeoutError(f"{behind} of {len(self)} trajectories are not {stage} after {timeout} s")
                _wait(answer, min(left, _LOOK))
        return [shipment.ids[place] for shipment, places in self._parts for place in places]


def _wait(answer: Any, seconds: float) -> None:
    """Wait for an answer; without one, until it is time to look whether a store is asked again."""
    if answer is None:
        time.sleep(min(seconds, _TOGETHER))
    else:
        ray().wait([answer], timeout=seconds)


class Outbox:
    """All that a handle has sent and does not know to be committed. Safe to call from several threads.

    What is added within a short time goes in one parcel: to send one costs as much as to store hundreds of small
    trajectories.

    Args:
        stores: where it goes.
        routes: chooses among them.
        options: how much may be under way.
    """

    def __init__(self, stores: Stores, routes: Routes, options: HandleOptions) -> None:
        self._stores = stores
        self._routes = routes
        self._options = options
        self._watermarks = Watermarks()
        self._arena = Arena(PARCEL_BYTES)
        self._lock = locks.rlock("Outbox._lock")
        self._under_way: deque[Shipment] = deque()
        self._timer: threading.Timer | None = None
        self._departed = -1e9
        self._hoped = time.monotonic()
        self._asked: dict[int, Any] = {}
        """What silent stores were asked, to hear whether they are back: a parcel would wait for its patience."""

    def send(self, flats: Sequence[FlatTrajectory]) -> Receipt:
        """Send trajectories, now or a moment later; wait while there is no room for more under way.

        Raises:
            StoreUnreachableError, StoreWriteError: what was sent before cannot be stored at present.
        """
        parts = []
        with self._lock:
            self._ask_silent()
            for part, nbytes in split(flats, PARCEL_BYTES):
                self._make_room(nbytes)
                parts.append(self._fill(part, nbytes))
            if parts:
                self._dispatch()
        return Receipt(parts, self._lock)

    def _ask_silent(self) -> None:
        """Hear which silent stores have answered; ask the others again from time to time."""
        if self._asked:
            ready, _ = ray().wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
            for rank, answer in list(self._asked.items()):
                if answer in ready:
                    del self._asked[rank]
                    self._hear(rank, answer)
        if time.monotonic() - self._hoped < _HOPE:
            return
        self._hoped = time.monotonic()
        for rank in self._routes.silent:
            self._stores.forget(rank)  # another actor may have its name by now
            try:
                self._asked[rank] = self._stores.submit(rank, "describe")
            except StoreUnreachableError as error:
                logger.info("%s", error)

    def _hear(self, rank: int, answer: Any) -> None:
        try:
            ray().get(answer)
        except away() as error:
            logger.info("store rank_%d is still away: %s", rank, first_line(error))
        else:
            self._routes.answered(rank)

    def _fill(self, flats: Sequence[FlatTrajectory], nbytes: int) -> tuple[Shipment, range]:
        """Add trajectories to the shipment that is being filled, if so many bytes fit, else to a new one."""
        last = self._under_way[-1] if self._under_way else None
        if last is not None and last.stage == "filling":
            if last.nbytes + nbytes <= PARCEL_BYTES:
                return last, last.fill(flats, self._arena)
            self._depart(last)
        shipment = Shipment(self._stores, self._routes, self._watermarks)
        places = shipment.fill(flats, self._arena)
        self._under_way.append(shipment)  # last: an empty one is never sent
        return shipment, places

    def _dispatch(self) -> None:
        """Send the newest shipment, or see to it that it is sent soon."""
        pause = self._departed + _TOGETHER - time.monotonic()
        if pause <= 0:
            self._depart(self._under_way[-1])
        elif self._timer is None:
            timer = threading.Timer(pause, self._time_is_up)
            timer.daemon = True  # the end of the process does not wait for it; what is not sent then is told
            try:
                start_thread(timer)
            except RuntimeError:  # the interpreter is ending, or there is no memory for a thread
                self._depart(self._under_way[-1])
            else:
                self._timer = timer

    def _depart(self, shipment: Shipment) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        shipment.depart()
        self._departed = time.monotonic()

    def _time_is_up(self) -> None:
        from ray.exceptions import RayError

        with self._lock:
            if self._timer is None or self._timer is not threading.current_thread():
                return  # it was sent meanwhile, and others have been added since
            try:
                self._depart(self._under_way[-1])
            except (RayError, ConfigurationError, StoreUnreachableError) as error:
                logger.warning("trajectories are not sent yet (%s); the next call tries again", first_line(error))

    def _make_room(self, nbytes: int) -> None:
        self._look()
        while self._under_way and sum(one.nbytes for one in self._under_way) + nbytes > self._options.max_pending_bytes:
            if self._under_way[0].advance(time.monotonic() + _LOOK, "done"):
                self._forget_done()

    def _look(self) -> None:
        """Take in the answers that are there."""
        asked = {shipment.answer: shipment for shipment in self._under_way if shipment.answer is not None}
        if asked:
            ready, _ = ray().wait(list(asked), num_returns=len(asked), timeout=0)
            for answer in ready:
                asked[answer].take()
        self._forget_done()

    def _forget_done(self) -> None:
        self._under_way = deque(one for one in self._under_way if not one.reached("done"))

    def flush(self, timeout: float | None) -> None:
        """Return when everything that was sent is committed.

        Raises:
            TimeoutError, StoreUnreachableError, StoreWriteError: see :meth:`Receipt.committed`.
        """
        with self._lock:
            under_way = [(shipment, range(shipment.count)) for shipment in self._under_way]
        Receipt(under_way, self._lock).committed(timeout)
        with self._lock:
            self._forget_done()

    @property
    def parcels(self) -> int:
        """Number of parcels that are not known to be committed."""
        return sum(one.stage != "done" for one in self._under_way)

    @property
    def trajectories(self) -> int:
        """Number of trajectories in them."""
        return sum(one.count for one in self._under_way if one.stage != "done")
