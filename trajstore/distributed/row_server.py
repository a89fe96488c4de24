"""Answers requests for rows over TCP; a thread for each connection."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.sampling.base import Drawn
from trajstore.distributed.frames import received, received_frame, run, secured, sent
from trajstore.distributed.read_request import MOST_REQUEST, READ, packed_error, requested
from trajstore.errors import StoreClosedError, StoreError, TrajectoryUnavailableError, TrajstoreError

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 2048

_SECRET_WITHIN = 10.0  # seconds

_IDLE = 600.0
"""Seconds without a request after which a connection is closed; learners connect again. Their node may be dead."""

_MOST_SECONDS = 3600.0
"""Most seconds for which a learner may have the store wait until it has received its answer."""


@dataclass(frozen=True, slots=True)
class RowAddress:
    """Where a store answers requests for rows.

    Attributes:
        host: IP address of its node.
        port: TCP port.
        secret: the first bytes of every connection; known to those whom Ray lets call the store.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)


class RowServer:
    """Listens from the first :meth:`address` on. Each connection has at most one request or answer in memory.

    Args:
        read: returns columns of drawn rows, packed by :func:`.read_request.pack`.
        host: IP address of this node.
    """

    def __init__(self, read: Callable[[Drawn, Sequence[str] | None], npt.NDArray[np.uint8]], host: str) -> None:
        self._read = read
        self._host = host
        self._secret = secrets.token_bytes(32)
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}  # by descriptor
        self._closed = False
        self._lock = locks.lock("RowServer._lock")

    def address(self) -> RowAddress:
        """Return the address; listen there.

        Raises:
            StoreClosedError: the server is closed.
            StoreError: the node has no such address, or no free port.
        """
        with self._lock:
            if self._closed:
                raise StoreClosedError("rows are requested of a store that was closed")
            if self._listener is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                try:
                    self._listener = socket.create_server((self._host, 0), family=family, backlog=128)
                except OSError as error:
                    raise StoreError(f"rows cannot be served at this node's address {self._host}: {error}") from error
                _start(self._accept, self._listener)
            return RowAddress(self._host, self._listener.getsockname()[1], self._secret)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        with self._lock:
            self._closed = True
            listener = () if self._listener is None else (self._listener,)
            for each in (*listener, *self._connections.values()):
                with suppress(OSError):  # it has ended
                    each.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed:
                try:
                    connection, peer = listener.accept()
                    _start(self._serve, connection, f"{peer[0]}:{peer[1]}")
                except (OSError, RuntimeError) as error:
                    if not self._closed:  # for example too many open files, or threads
                        logger.warning("a learner cannot connect: %s", error)
                        time.sleep(1.0)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        number, idle = connection.fileno(), False
        try:
            with self._lock:
                if self._closed or len(self._connections) >= MOST_CONNECTIONS:
                    logger.warning("%s is refused: closed, or %d connections", peer, MOST_CONNECTIONS)
                    return
                self._connections[number] = connection
            connection.setblocking(False)
            until = time.monotonic() + _SECRET_WITHIN
            connection = self._connections[number] = run(secured(connection, None), until)
            secret = run(received(connection, np.empty(len(self._secret), np.uint8)), until)
            if not hmac.compare_digest(secret.tobytes(), self._secret):
                logger.warning("%s is refused: it does not know the secret of this store", peer)
                return
            while not self._closed:
                idle = True
                request = run(received_frame(connection, (READ,), MOST_REQUEST), time.monotonic() + _IDLE)
                idle = False
                self._answer(connection, request.data, peer)
                del request
        except OSError as error:
            if not (idle and isinstance(error, ConnectionError | TimeoutError)):  # else the learner has ended
                logger.warning("the connection of %s is closed: %s", peer, error)
        finally:
            with self._lock:
                self._connections.pop(number, None)
            connection.close()

    def _answer(self, connection: socket.socket, request: memoryview, peer: str) -> None:
        began, seconds = time.monotonic(), _SECRET_WITHIN
        try:
            drawn, columns, seconds = requested(request)
            answer = self._read(drawn, columns).data
        except Exception as error:
            if not isinstance(error, TrajectoryUnavailableError):
                logger.warning("a request of %s fails: %s", peer, error, exc_info=not isinstance(error, TrajstoreError))
            answer = memoryview(packed_error(error))
        run(sent(connection, answer), began + min(seconds, _MOST_SECONDS) + 1.0)


def _start(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name="trajstore-rows", daemon=True).start()
