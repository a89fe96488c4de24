"""Work that nobody need wait for: calls, in the order in which they came, in threads of their own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trajstore.core.base import locks
from trajstore.core.base.interrupts import WaitList, seconds_until, start_thread
from trajstore.errors import StoreClosedError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], None]
    weight: int
    group: int
    begun: bool = False


class Background:
    """Begins calls in the order in which they came. What one raises is raised to the caller later, once.

    Who calls may be interrupted between any two instructions: a call enters with one ``deque.append``, and leaves
    when it has ended. In a forked child all methods refuse: the threads are the parent's.

    Args:
        name: of the threads, and in messages.
        most: calls may wait whose weights add up to this; a heavier one waits alone. ``None`` = any.
        workers: calls that run at the same time.
    """

    def __init__(self, name: str, most: int | None = None, workers: int = 1) -> None:
        self._name = name
        self._most = most
        self._pid = os.getpid()
        self._lock = locks.rlock("Background._lock")  # a signal handler may wait while its thread is in here
        self._wait_list = WaitList()
        self._calls: deque[_Call] = deque()
        """Those that wait and those that run."""
        self._error: BaseException | None = None
        self._closing = False
        try:
            for _ in range(workers):
                start_thread(threading.Thread(target=self._run, name=name, daemon=True))
        except BaseException:
            self._closing = True  # an interrupt may come when some run already
            raise

    @property
    def closed(self) -> bool:
        """Whether nothing is left to be done here: closed, or the parent's."""
        return self._closing or os.getpid() != self._pid

    def submit(self, function: Callable[[], None], weight: int = 1, group: int = 0) -> None:
        """Let this be called soon; waits while too much waits already.

        Args:
            function: what is called.
            weight: counts in ``most`` and in what :meth:`close` returns.
            group: told by :meth:`waiting`.

        Raises:
            StoreClosedError: closed, or this is a forked child.
            BaseException: what an earlier call raised; this one is submitted nevertheless.
        """
        call = _Call(function, weight, group)

        def taken() -> bool:
            if self._closing:
                raise StoreClosedError(f"{self._name}: was closed")
            weights = sum(one.weight for one in self._calls) + weight
            if self._calls and self._most is not None and weights > self._most:
                return False
            self._calls.append(call)
            self._wait_list.wake()
            return True

        self._until(taken)

    def waiting(self) -> set[int]:
        """Return the groups of calls that have not begun."""
        with self._lock:
            return {one.group for one in self._calls if not one.begun}

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether everything submitted before has been called, within ``timeout`` seconds.

        Raises:
            StoreClosedError: this is a forked child.
            BaseException: what a call raised.
        """
        before: list[_Call] | None = None

        def called() -> bool:
            nonlocal before
            if before is None:
                before = list(self._calls)
            return not any(one in self._calls for one in before)

        return self._until(called, timeout)

    def close(self, timeout: float | None = None) -> tuple[int, int]:
        """Take nothing more, and wait up to ``timeout`` seconds for what was submitted. Again, or in a child: nothing.

        Returns:
            Weight of the calls that had not begun by then and are given up, and number of those that are still running.

        Raises:
            BaseException: what a call raised.
        """
        if os.getpid() != self._pid:
            return 0, 0
        with self._lock:
            self._closing = True
            self._wait_list.wake()
        self.wait(timeout)
        with self._lock:
            left = [one for one in self._calls if not one.begun]
            for one in left:
                self._calls.remove(one)
            self._wait_list.wake()
            return sum(one.weight for one in left), len(self._calls)

    def _until(self, reached: Callable[[], bool], timeout: float | None = None) -> bool:
        """Ask with the lock held, and after every change again, until it says yes; then raise what a call raised.

        Returns:
            Whether it said yes in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if os.getpid() != self._pid:
                raise StoreClosedError(f"{self._name}: belongs to the parent process")
            with self._lock:
                if reached():
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                gate = self._wait_list.gate()
            self._wait_list.wait(gate, seconds_until(deadline))
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.function()
            except BaseException as error:  # the thread must live on; whoever waits or submits is told
                self._keep(error)
            with self._lock:
                self._calls.remove(call)
                self._wait_list.wake()
            del call  # with all that it holds, while nothing comes

    def _next(self) -> _Call | None:
        """Return the next call, which stays among those that there are; None if there will be none."""
        while True:
            with self._lock:
                call = next((one for one in self._calls if not one.begun), None)
                if call is not None:
                    call.begun = True
                    return call
                if self._closing:
                    return None
                gate = self._wait_list.gate()
            self._wait_list.wait(gate)

    def _keep(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
                return
        logger.error("%s: after an error that was not told yet: %r", self._name, error)
