"""Frames over TCP, as generators that yield what they wait for, so that one thread runs several with one deadline.

A learner connects, sends the store's secret, and then requests; each is answered by one frame. Where Ray uses TLS, the
connection does, with the same certificates on both sides.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")

Steps = Generator[tuple[int, int], None, T]
"""Work on a connection; yields descriptor and events of ``select.poll`` for which it waits."""

FRAME = struct.Struct("<8sQ")
"""Beginning of a frame: its kind, and its size in bytes."""


def run_all(conversations: Mapping[K, Steps[T]], until: float) -> dict[K, T | OSError]:
    """Run conversations in parallel until all have ended; return their results or errors by key.

    Args:
        conversations: the generators, each on a connection of its own.
        until: time at which the remaining ones are closed, with TimeoutError (monotonic clock).
    """
    results: dict[K, T | OSError] = {}
    waiting: dict[int, K] = {}
    poll = select.poll()

    def go_on(key: K) -> None:
        try:
            descriptor, events = next(conversations[key])
        except StopIteration as end:
            results[key] = end.value
        except OSError as error:
            results[key] = error
        else:
            waiting[descriptor] = key
            poll.register(descriptor, events)

    for key in conversations:
        go_on(key)
    while waiting:
        left = until - time.monotonic()
        ready = poll.poll(left * 1e3) if left > 0 else []
        if not ready:
            for key in waiting.values():
                conversations[key].close()
                results[key] = TimeoutError(errno.ETIMEDOUT, "no answer")
            break
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            go_on(waiting.pop(descriptor))
    return results


def run(conversation: Steps[T], until: float) -> T:
    """Run one conversation; see :func:`run_all`.

    Raises:
        OSError: it failed, or the time is up.
    """
    result = run_all({None: conversation}, until)[None]
    if isinstance(result, OSError):
        raise result
    return result


def connected(host: str, port: int, secret: bytes) -> Steps[socket.socket]:
    """Return a connection over which requests can be sent."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.setblocking(False)
        if connection.connect_ex((host, port)) == errno.EINPROGRESS:
            yield connection.fileno(), select.POLLOUT
        if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        connection = yield from secured(connection, host)
        yield from sent(connection, memoryview(secret))
    except BaseException:
        connection.close()
        raise
    return connection


def secured(connection: socket.socket, host: str | None) -> Steps[socket.socket]:
    """Return a new connection, in TLS where Ray uses it; packets leave at once.

    Args:
        connection: a connected socket, without blocking.
        host: the server, which its certificate must name; None on the server's side.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if os.environ.get("RAY_USE_TLS", "").lower() not in ("1", "true"):
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if host is None else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    encrypted = context.wrap_socket(
        connection, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
    )
    try:
        yield from _once_ready(encrypted, select.POLLIN, encrypted.do_handshake)
    except BaseException:
        encrypted.close()
        raise
    return encrypted


def sent(connection: socket.socket, data: memoryview) -> Steps[None]:
    """Send bytes."""
    while data:
        count = yield from _once_ready(connection, select.POLLOUT, connection.send, data)
        data = data[count:]


def received(connection: socket.socket, block: npt.NDArray[np.uint8]) -> Steps[npt.NDArray[np.uint8]]:
    """Fill an array with what is received; return it. ConnectionResetError if the peer ends before."""
    view = block.data
    while view:
        count = yield from _once_ready(connection, select.POLLIN, connection.recv_into, view)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        view = view[count:]
    return block


def received_frame(connection: socket.socket, kinds: Collection[bytes], most: int) -> Steps[npt.NDArray[np.uint8]]:
    """Receive a frame of at most ``most`` bytes; OSError if it is longer, or none of these kinds."""
    head = yield from received(connection, np.empty(FRAME.size, np.uint8))
    kind, nbytes = FRAME.unpack(head.data)
    if kind not in kinds or not FRAME.size <= nbytes <= most:
        raise OSError(errno.EPROTO, f"no frame of this version of trajstore: {kind!r}, {nbytes} bytes")
    frame = np.empty(nbytes, np.uint8)
    frame[: FRAME.size] = head
    yield from received(connection, frame[FRAME.size :])
    return frame


def _once_ready(
    connection: socket.socket, events: int, call: Callable[P, T], *given: P.args, **named: P.kwargs
) -> Steps[T]:
    """Call until it does not wait any more; TLS may have to write to read, and conversely."""
    while True:
        try:
            return call(*given, **named)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wait:
            if isinstance(wait, ssl.SSLError):
                events = select.POLLIN if isinstance(wait, ssl.SSLWantReadError) else select.POLLOUT
            yield connection.fileno(), events
