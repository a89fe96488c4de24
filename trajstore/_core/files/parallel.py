"""An ordered, bounded map over items by several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_THREADS = 4
"""Checksums and writes release the GIL, and most of a write is waiting for the disk or the network."""


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
