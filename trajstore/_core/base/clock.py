"""The machine's time in microseconds, as stores record it."""

from __future__ import annotations

import time


def microseconds() -> int:
    """Return the µs since 1970; 0 if the clock is set before that, since stores have no negative times."""
    return max(0, time.time_ns() // 1000)
