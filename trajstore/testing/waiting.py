"""Waiting in tests for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds; what has not come by then never will."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as a condition holds.

    Raises:
        TimeoutError: it did not within ``PATIENCE``.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {PATIENCE:.0f} s")
        time.sleep(0.005)
