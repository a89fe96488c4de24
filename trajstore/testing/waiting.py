"""Waiting in tests for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds; what has not come by then never will."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as a condition holds.

    Raises:
        TimeoutError: it did not within a minute.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing happened for a minute")
        time.sleep(0.005)
