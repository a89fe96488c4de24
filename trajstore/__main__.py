"""The command line as a process: ``trajstore`` and ``python -m trajstore``."""

import atexit
import os
import signal
import sys
import time

from trajstore.cli import INTERRUPTED, main

_TOGETHER = 1.0
"""Seconds within which several interrupts are one: programs that start others often repeat it."""


def run() -> int:
    """Run the command line and return its exit code.

    Ctrl-C interrupts the command, which then releases its locks and files; a later one ends the process at once.
    """
    first: list[float] = []

    def interrupt(*_: object) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() > first[0] + _TOGETHER:
            os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # shells let background jobs ignore it
        signal.signal(signal.SIGINT, interrupt)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the interpreter would restore the default
    return main()


if __name__ == "__main__":
    sys.exit(run())
