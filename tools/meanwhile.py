"""Work that goes on in a thread of its own while something else is looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object], pause: float) -> Iterator[None]:
    """Call ``work`` again and again as long as this is entered, ``pause`` seconds apart; what it raised is raised."""
    stopped, failed = threading.Event(), []

    def run() -> None:
        try:
            while not stopped.wait(pause):
                work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    if failed:
        raise failed[0]
