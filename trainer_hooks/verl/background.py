"""Work that a training step need not wait for: calls, one after the other, in a thread of their own."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trajstore import locks
from trajstore.errors import StoreClosedError
from trajstore.interrupts import Parking, start_thread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    function: Callable[[], None]
    weight: int


class Background:
    """Runs calls in the order in which they came. What one raises is raised to the caller later, once.

    Who calls may be interrupted between any two instructions: a call enters with one ``deque.append``, and leaves
    when it has ended. In a forked child all methods refuse: the thread is the parent's.

    Args:
        name: of the thread, and in messages.
        most: calls may wait whose weights add up to this; a heavier one waits alone.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._pid = os.getpid()
        self._lock = locks.rlock("Background._lock")  # a signal handler may wait while its thread is in here
        self._parking = Parking()
        self._calls: deque[_Call] = deque()
        """The first one is running."""
        self._error: BaseException | None = None
        self._closing = False
        try:
            start_thread(threading.Thread(target=self._run, name=name, daemon=True))
        except BaseException:
            self._closing = True  # an interrupt may come when it runs already
            raise

    @property
    def closed(self) -> bool:
        """Whether nothing is left to be done here: closed, or the parent's."""
        return self._closing or os.getpid() != self._pid

    def submit(self, function: Callable[[], None], weight: int) -> None:
        """Let this be called soon; waits while too much waits already.

        Raises:
            StoreClosedError: closed, or this is a forked child.
            BaseException: what an earlier call raised; this one is submitted nevertheless.
        """
        call = _Call(function, weight)

        def taken() -> bool:
            if self._closing:
                raise StoreClosedError(f"{self._name}: was closed")
            if self._calls and sum(one.weight for one in self._calls) + weight > self._most:
                return False
            self._calls.append(call)
            self._parking.wake()
            return True

        self._until(taken)

    def wait(self) -> None:
        """Return when everything submitted before has been called.

        Raises:
            StoreClosedError: this is a forked child.
            BaseException: what a call raised.
        """
        before: list[_Call] | None = None

        def called() -> bool:
            nonlocal before
            if before is None:
                before = [self._calls[-1]] if self._calls else []
            return not before or before[0] not in self._calls

        self._until(called)

    def close(self) -> None:
        """Take nothing more, and return when everything submitted has been called. Again, or in a child: nothing.

        Raises:
            BaseException: what a call raised.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            self._parking.wake()
        self.wait()

    def _until(self, reached: Callable[[], bool]) -> None:
        """Ask with the lock held, and after every change again, until it says yes; then raise what a call raised."""
        while True:
            self._check_process()
            with self._lock:
                if reached():
                    break
                gate = self._parking.gate()
            self._parking.wait(gate)
        self._tell()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self._name}: belongs to the parent process")

    def _tell(self) -> None:
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.function()
            except BaseException as error:  # the thread must live on; whoever waits or submits is told
                self._keep(error)
            with self._lock:
                self._calls.popleft()
                self._parking.wake()
            del call  # with all that it holds, while nothing comes

    def _next(self) -> _Call | None:
        """Return the next call, which stays first among those that wait; None if there will be none."""
        while True:
            with self._lock:
                if self._calls:
                    return self._calls[0]
                if self._closing:
                    return None
                gate = self._parking.gate()
            self._parking.wait(gate)

    def _keep(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
                return
        logger.error("%s: after an error that was not told yet: %r", self._name, error)
