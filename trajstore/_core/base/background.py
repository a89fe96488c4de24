"""Background threads that run callables in order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trajstore._core.base import locks
from trajstore._core.base.interrupts import WaitList, seconds_until, start_thread
from trajstore.errors import StoreClosedError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], None]
    weight: int
    group: int
    begun: bool = False


class Background:
    """Runs callables in FIFO order; an exception is re-raised once, at the next submit, wait or close.

    Safe against interrupts of the caller between any two instructions: a call is added by one ``deque.append`` and
    removed once it has ended. In a forked child all methods refuse: the threads are the parent's.

    Args:
        name: of the threads, and in messages.
        most: limit on the sum of pending calls' weights; a heavier call waits alone. ``None`` = no limit.
        workers: number of calls that run at the same time.
    """

    def __init__(self, name: str, most: int | None = None, workers: int = 1) -> None:
        self._name = name
        self._most = most
        self._pid = os.getpid()
        self._lock = locks.rlock("Background._lock")  # a signal handler may wait while its thread holds it
        self._wait_list = WaitList()
        self._calls: deque[_Call] = deque()
        """Pending and running calls."""
        self._error: BaseException | None = None
        self._closing = False
        try:
            for _ in range(workers):
                start_thread(threading.Thread(target=self._run, name=name, daemon=True))
        except BaseException:
            self._closing = True  # an interrupt may come when some threads already run
            raise

    @property
    def closed(self) -> bool:
        """True once closed, and in a forked child."""
        return self._closing or os.getpid() != self._pid

    def submit(self, function: Callable[[], None], weight: int = 1, group: int = 0) -> None:
        """Queue a call; waits while the queue is full.

        Args:
            function: to call.
            weight: counts towards ``most`` and the result of :meth:`close`.
            group: reported by :meth:`waiting`.

        Raises:
            StoreClosedError: closed, or this is a forked child.
            BaseException: an earlier call's; this one is queued nevertheless.
        """
        call = _Call(function, weight, group)

        def taken() -> bool:
            if self._closing:
                raise StoreClosedError(f"{self._name}: was closed")
            weights = sum(queued.weight for queued in self._calls) + weight
            if self._calls and self._most is not None and weights > self._most:
                return False
            self._calls.append(call)
            self._wait_list.wake()
            return True

        self._until(taken)

    def waiting(self) -> set[int]:
        """Return the groups of calls that have not begun."""
        with self._lock:
            return {queued.group for queued in self._calls if not queued.begun}

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all calls queued before have ended; return False after ``timeout`` seconds.

        Raises:
            StoreClosedError: this is a forked child.
            BaseException: a call's.
        """
        before: list[_Call] | None = None

        def called() -> bool:
            nonlocal before
            if before is None:
                before = list(self._calls)
            return not any(queued in self._calls for queued in before)

        return self._until(called, timeout)

    def close(self, timeout: float | None = None) -> tuple[int, int]:
        """Refuse new calls; wait up to ``timeout`` seconds for the others. Does nothing when repeated, or in a child.

        Returns:
            Weight of the calls dropped because they had not begun, and number of those still running.

        Raises:
            BaseException: a call's.
        """
        if os.getpid() != self._pid:
            return 0, 0
        with self._lock:
            self._closing = True
            self._wait_list.wake()
        self.wait(timeout)
        with self._lock:
            left = [queued for queued in self._calls if not queued.begun]
            for queued in left:
                self._calls.remove(queued)
            self._wait_list.wake()
            return sum(queued.weight for queued in left), len(self._calls)

    def _until(self, reached: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``reached()`` is true, checking it with the lock held; then re-raise a queued call's exception.

        Returns:
            False on timeout.
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
            except BaseException as error:  # the thread must live on; the next submit or wait raises it
                self._keep(error)
            with self._lock:
                self._calls.remove(call)
                self._wait_list.wake()
            del call  # frees its objects before the wait

    def _next(self) -> _Call | None:
        """Return the next call, which stays in the queue; None if there will be none."""
        while True:
            with self._lock:
                call = next((queued for queued in self._calls if not queued.begun), None)
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
        logger.error("%s: after an error that was not reported yet: %r", self._name, error)
