"""Doing the same to many things by several threads, with a bound on how much of it waits in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_THREADS = 4
"""Checksums and writes let the interpreter go, and most of a write is waiting for the disk or the network."""


def in_order(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Yield what a function makes of each item, in their order, while it works on the next ones.

    Items are taken by the calling thread, at most twice as many ahead as there are threads. The first error is
    raised when what is under way has ended.
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
