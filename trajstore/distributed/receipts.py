"""What a producer holds of trajectories on their way, and all that a handle has sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from trajstore import locks
from trajstore.columns.flat import FlatTrajectory
from trajstore.distributed.actors import Stores
from trajstore.distributed.options import HandleOptions
from trajstore.distributed.parcel import pack, split
from trajstore.distributed.routes import Routes
from trajstore.distributed.shipment import Shipment, Stage

_HOPE = 10.0  # seconds after which silent stores are tried again


class Receipt:
    """Of one ``add_trajectories``: says when the trajectories are in a store, and when they survive a crash."""

    def __init__(self, shipments: Sequence[Shipment], lock: locks.Lock) -> None:
        self._shipments = shipments
        self._lock = lock

    def __len__(self) -> int:
        """Number of trajectories."""
        return sum(shipment.count for shipment in self._shipments)

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
        return all(shipment.stage == "done" for shipment in self._shipments)

    def _reach(self, stage: Stage, timeout: float | None) -> list[int]:
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        for shipment in self._shipments:
            while True:
                with self._lock:
                    if shipment.advance(min(until, time.monotonic() + 1.0), stage):
                        break
                if time.monotonic() >= until:
                    left = sum(part.count for part in self._shipments if part.stage != "done")
                    raise TimeoutError(f"{left} of {len(self)} trajectories are not {stage} after {timeout} s")
        return [number for shipment in self._shipments for number in shipment.ids]


class Outbox:
    """All that a handle has sent and does not know to be committed. Safe to call from several threads.

    Args:
        stores: where it goes.
        routes: chooses among them.
        options: how much may be under way.
    """

    def __init__(self, stores: Stores, routes: Routes, options: HandleOptions) -> None:
        self._stores = stores
        self._routes = routes
        self._options = options
        self._lock = locks.rlock("Outbox._lock")
        self._under_way: deque[Shipment] = deque()
        self._hoped = time.monotonic()

    def send(self, flats: Sequence[FlatTrajectory]) -> Receipt:
        """Send trajectories; wait while there is no room for more under way.

        Raises:
            StoreUnreachableError, StoreWriteError: what was sent before cannot be stored at present.
        """
        shipments = []
        with self._lock:
            if time.monotonic() - self._hoped > _HOPE:
                self._routes.hopeful()
                self._hoped = time.monotonic()
            for part in split(flats, self._options.parcel_bytes):
                parcel = pack(part)
                self._make_room(parcel.nbytes)
                shipments.append(Shipment(self._stores, self._routes, parcel, len(part)))
                self._under_way.append(shipments[-1])
        return Receipt(shipments, self._lock)

    def _make_room(self, nbytes: int) -> None:
        while self._under_way and self._under_way[0].advance(0.0, "done"):
            self._under_way.popleft()
        while self._under_way and sum(one.nbytes for one in self._under_way) + nbytes > self._options.max_pending_bytes:
            if self._under_way[0].advance(time.monotonic() + 1.0, "done"):
                self._under_way.popleft()

    def flush(self, timeout: float | None) -> None:
        """Return when everything that was sent is committed.

        Raises:
            TimeoutError, StoreUnreachableError, StoreWriteError: see :meth:`Receipt.committed`.
        """
        with self._lock:
            under_way = list(self._under_way)
        Receipt(under_way, self._lock).committed(timeout)
        with self._lock:
            self._under_way = deque(one for one in self._under_way if one.stage != "done")

    @property
    def parcels(self) -> int:
        """Number of parcels that are not known to be committed."""
        return sum(one.stage != "done" for one in self._under_way)

    @property
    def trajectories(self) -> int:
        """Number of trajectories in them."""
        return sum(one.count for one in self._under_way if one.stage != "done")
