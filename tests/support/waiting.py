"""Waiting in tests for other threads or processes, on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0
"""Time limit in seconds."""


def wait_until(condition: Callable[[], bool], pause: float = 0.005) -> None:
    """Wait until a condition is true; ask every ``pause`` seconds.

    Raises:
        TimeoutError: it was not within ``PATIENCE``.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {PATIENCE:.0f} s")
        time.sleep(pause)
