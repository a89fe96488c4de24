"""A store kept as it is for a moment, while all stores of a run are saved. Knows nothing of stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trajstore.core.base import locks
from trajstore.errors import StoreWriteError

_LOOK_AGAIN = 60.0  # seconds; a wait cannot be endless


class Hold:
    """Lets changes through, or keeps them waiting. Safe to call from several threads.

    A holder that says nothing more is forgotten after the seconds that it asked for, so that a run does not stand still
    because somebody who saved it was killed.

    Args:
        clock: seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = locks.condition("Hold._changed")
        self._by: str | None = None
        self._until = 0.0
        self._seconds = 0.0
        self._inside = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change something; waits while the store is held."""
        with self._changed:
            while self._is_held():
                self._changed.wait(min(self._until - self._clock(), _LOOK_AGAIN))
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def begin(self, by: str, seconds: float) -> None:
        """Let no change through, and return when those that are under way have ended.

        Args:
            by: who holds it; the same may ask again.
            seconds: after which it is let go if nothing more is heard.

        Raises:
            StoreWriteError: somebody else has held it for as long, or a change has taken as long.
        """
        end = self._clock() + seconds
        with self._changed:
            while self._is_held() and self._by != by:
                if self._clock() >= end:
                    raise StoreWriteError(f"another handle has held the store for {seconds:.0f} s, to save it")
                self._changed.wait(min(self._until - self._clock(), end - self._clock(), _LOOK_AGAIN))
            self._by, self._seconds, self._until = by, seconds, self._clock() + seconds
            while self._inside and self._clock() < end:
                self._changed.wait(end - self._clock())
            if self._inside:
                self._by = None
                self._changed.notify_all()
                raise StoreWriteError(f"what was being added or evicted has not ended for {seconds:.0f} s")
            self._until = self._clock() + seconds

    @contextmanager
    def keeping(self, by: str) -> Iterator[None]:
        """Do something with what is held, for as long as it takes.

        Raises:
            StoreWriteError: it is held no longer, so it may have changed.
        """
        with self._changed:
            if not self._is_held() or self._by != by:
                raise StoreWriteError(
                    "the store was let go before it was saved: its process was started again, or the other stores "
                    "took too long"
                )
            self._until = float("inf")
        try:
            yield
        finally:
            with self._changed:
                self._until = self._clock() + self._seconds

    def end(self, by: str) -> None:
        """Let changes through again; nothing to do if somebody else holds it."""
        with self._changed:
            if self._by == by:
                self._by = None
                self._changed.notify_all()

    def _is_held(self) -> bool:
        return self._by is not None and self._clock() < self._until
