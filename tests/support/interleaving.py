"""Two calls in two threads, at every moment that they can meet."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType, ModuleType
from typing import Any, TypeVar

A, B = TypeVar("A"), TypeVar("B")


def interleavings(
    module: ModuleType, make: Callable[[], tuple[Callable[[], A], Callable[[], B]]]
) -> Iterator[tuple[A, B]]:
    """Run two calls once for each line of ``module`` that the first one executes; yield their results.

    Before that line, the second call runs in another thread, until it ends or waits for a lock of the first one.
    """
    for at in itertools.count():
        first, second = make()
        lines, started = 0, list[Future[B]]()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != module.__file__:
                return None
            if event == "line":
                if lines == at:  # noqa: B023 - called in this iteration
                    started.append(elsewhere.submit(second))  # noqa: B023
                    wait(started, 0.02)  # noqa: B023
                lines += 1
            return trace

        before = sys.gettrace()
        with ThreadPoolExecutor(1) as elsewhere:
            sys.settrace(trace)
            try:
                result = first()
            finally:
                sys.settrace(before)
        if not started:
            assert at > 0, f"nothing of {module.__name__} was called"
            return
        yield result, started[0].result()
