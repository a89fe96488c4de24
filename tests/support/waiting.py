"""Waiting in tests for other threads or processes, on machines of any speed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tools.proc import stat

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


def freeze(process: int) -> None:
    """Stop a process, and wait until all its threads stand: one takes the signal, and others run on until then."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    wait_until(lambda: all(stat(f"{process}/task/{thread.name}")[:1] in ([], ["T"]) for thread in threads.iterdir()))
