"""The machine's time, as stores keep it."""

from __future__ import annotations

import time


def microseconds() -> int:
    """Return the µs since 1970; 0 where the clock is set before that: a store has no time below it."""
    return max(0, time.time_ns() // 1000)
