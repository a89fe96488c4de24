"""Ordered maps over items by several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_THREADS = 4
"""Checksums and writes release the GIL, and most of a write is waiting for the disk or the network."""

_AT_ONCE = 16
"""Requests to a server: each waits for its answer."""


def at_once(function: Callable[[A], B], items: Sequence[A], *, waits: bool = True) -> list[B]:
    """Return ``function(item)`` for each item in order, called several at once; raise the first error once all ended.

    Args:
        function: to call.
        items: its arguments.
        waits: False if the calls do not wait for a server; then one follows the other, until an error.
    """
    if not waits or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_AT_ONCE, len(items)), thread_name_prefix="trajstore-requests") as pool:
        return [call.result() for call in [pool.submit(function, item) for item in items]]


def in_order(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Yield ``function(item)`` for each item in order, computing ahead in threads.

    The calling thread takes the items, at most twice as many ahead as there are threads. The first error is raised once
    the running calls have ended.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="trajstore-save") as pool:
        waiting: deque[Future[B]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= 2 * _THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
