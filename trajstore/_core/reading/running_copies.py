"""Tracks running row copies, and delays releases until they end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from trajstore._core.base import locks


class RunningCopies:
    """Keeps maps, memory and slot numbers alive while a copy may use them.

    Copies run without ``Contents.lock``, on addresses obtained with it held. Releases wait until no copy runs; copies
    are short, so their individual use is not tracked.

    The lock guards running copies and waiting releases. It is held for a few instructions; nothing is destroyed under
    it.

    Args:
        free: called with slot numbers that can be reused.
    """

    def __init__(self, free: Callable[[list[int]], None]) -> None:
        self._free = free
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[tuple[int | None, Any]] = []
        self._lock = locks.lock("RunningCopies._lock")

    def begin(self, copy: Any) -> None:
        """Keep everything resident in place until :meth:`end`; with ``Contents.lock`` held.

        Args:
            copy: identifies the copy. It may be dropped without :meth:`end`, for example on an interrupt; the next copy
                to end then releases what waits.
        """
        with self._lock:
            self._running.add(copy)

    def end(self, copy: Any) -> None:
        """End the copy begun with :meth:`begin`."""
        over: list[tuple[int | None, Any]] = []
        with self._lock:
            self._running.discard(copy)
            if not len(self._running) and self._waiting:
                over, self._waiting = self._waiting, over
                self._free([slot for slot, _ in over if slot is not None])

    def let_go(self, owner: Any, slot: int | None) -> None:
        """Release the owner of rows, and free its slot (None keeps it), once all copies begun before have ended."""
        with self._lock:
            if len(self._running):
                self._waiting.append((slot, owner))
                return
        if slot is not None:
            self._free([slot])

    @property
    def idle(self) -> bool:
        """True if no copy is running and no release is waiting."""
        with self._lock:
            return not len(self._running) and not self._waiting

    def stop(self) -> None:
        """Block copies from beginning or ending until :meth:`go_on`."""
        self._lock.acquire()

    def go_on(self, *, in_child: bool) -> None:
        """Undo :meth:`stop`; a forked child has no copying threads."""
        if in_child:
            self._running.clear()
        self._lock.release()
