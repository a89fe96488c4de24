"""Which copies of rows are running, and what must stay until they have ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from trajstore.core.base import locks


class RunningCopies:
    """Keeps maps, memory and numbers of slots from being given up while a copy may still use them.

    Copies run without ``Contents.lock``, on addresses that they were told with it held. So what is let go of waits
    until none is running: which of them use it need not be known, for they are short.

    The lock guards what is running and what waits. It is held for a few instructions; nothing is destroyed under it.

    Args:
        free: takes numbers of slots that can be given out again.
    """

    def __init__(self, free: Callable[[list[int]], None]) -> None:
        self._free = free
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[tuple[int | None, Any]] = []
        self._lock = locks.lock("RunningCopies._lock")

    def begin(self, copy: Any) -> None:
        """Keep everything that is resident now where it is, until :meth:`end`; with ``Contents.lock`` held.

        Args:
            copy: stands for the copy. It may also just be dropped, as an interrupt does; the next one to end makes up
                for it.
        """
        with self._lock:
            self._running.add(copy)

    def end(self, copy: Any) -> None:
        """End what :meth:`begin` began."""
        over: list[tuple[int | None, Any]] = []
        with self._lock:
            self._running.discard(copy)
            if not len(self._running) and self._waiting:
                over, self._waiting = self._waiting, over
                self._free([slot for slot, _ in over if slot is not None])

    def let_go(self, owner: Any, slot: int | None) -> None:
        """Drop what holds rows, and free its slot (None keeps it), once no copy that began before is running."""
        with self._lock:
            if len(self._running):
                self._waiting.append((slot, owner))
                return
        if slot is not None:
            self._free([slot])

    @property
    def idle(self) -> bool:
        """Whether no copy is running and nothing waits for one."""
        with self._lock:
            return not len(self._running) and not self._waiting

    def stop(self) -> None:
        """Let no copy begin or end until :meth:`go_on`."""
        self._lock.acquire()

    def go_on(self, *, in_child: bool) -> None:
        """End what :meth:`stop` began; a forked child has none of the threads that were copying."""
        if in_child:
            self._running.clear()
        self._lock.release()
