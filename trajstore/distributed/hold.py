"""A lock that blocks changes to a store while all stores of a run are saved. Independent of stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trajstore._core.base import locks
from trajstore.errors import StoreWriteError

_LOOK_AGAIN = 60.0  # seconds; `Condition.wait` rejects an infinite timeout


class Hold:
    """Blocks changes while it is held. Thread-safe.

    A hold expires after the seconds given to :meth:`begin`, so that a killed holder does not block the run.

    Args:
        clock: returns seconds since any origin.
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
        """Context of a change; waits while the store is held."""
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
        """Block new changes and wait for the running ones to end.

        Args:
            by: name of the holder; the same holder may call again.
            seconds: seconds until the hold expires, and limit of the wait.

        Raises:
            StoreWriteError: another holder, or a running change, took longer than ``seconds``.
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
                raise StoreWriteError(f"a call that adds or evicts has not ended for {seconds:.0f} s")
            self._until = self._clock() + seconds

    @contextmanager
    def keeping(self, by: str) -> Iterator[None]:
        """Keep the hold from expiring during the block.

        Raises:
            StoreWriteError: the hold has expired, so the store may have changed.
        """
        with self._changed:
            if not self._is_held() or self._by != by:
                raise StoreWriteError(
                    "the store was released before it was saved: its process restarted, or the other stores took too "
                    "long"
                )
            self._until = float("inf")
        try:
            yield
        finally:
            with self._changed:
                self._until = self._clock() + self._seconds

    def end(self, by: str) -> None:
        """Allow changes again; no effect unless held by ``by``."""
        with self._changed:
            if self._by == by:
                self._by = None
                self._changed.notify_all()

    def _is_held(self) -> bool:
        return self._by is not None and self._clock() < self._until
