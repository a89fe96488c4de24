"""Waiting and changing state safely with asynchronous exceptions: Ctrl-C, signal handlers that raise.

Python raises them in the main thread, between any two instructions. Two things are safe there: to wait without
holding a lock, and to run a critical change in another thread.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LONGEST = 1.0
"""Seconds after which every waiter checks again: an interrupt may have swallowed the wake-up."""

CHANGE_THREAD = "trajstore-change"
"""Name of the threads that run changes which an interrupt must not stop half-way."""


def closed_gate() -> threading.Lock:
    """Return a gate at which a thread waits with ``acquire``, until another lets it go on with ``release``."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class WaitList:
    """Threads that wait for a change. Unlike with a condition, waiting holds no lock and needs none afterwards."""

    def __init__(self) -> None:
        self._gates: dict[int, threading.Lock] = {}

    def gate(self) -> threading.Lock:
        """Return the gate to :meth:`wait` at; call it with the lock that guards the changes."""
        gate = closed_gate()
        self._gates[id(gate)] = gate
        return gate

    def wait(self, gate: threading.Lock, seconds: float | None = None) -> None:
        """Wait for :meth:`wake`, for about a second or ``seconds`` at most; without the lock.

        The caller then checks its condition again.
        """
        gate.acquire(timeout=max(0.0, min(_LONGEST, _LONGEST if seconds is None else seconds)))
        self._gates.pop(id(gate), None)

    def wake(self) -> None:
        """Wake all waiters; with the lock held."""
        gates, self._gates = self._gates, {}
        for gate in list(gates.values()):
            gate.release()


def seconds_until(deadline: float | None) -> float | None:
    """Return the seconds until a time of ``time.monotonic``; None if the time is None."""
    return None if deadline is None else deadline - time.monotonic()


def uninterrupted(call: Callable[[], T]) -> T:
    """Return ``call()``. An interrupt ends the wait for it, not the call itself.

    Only the main thread is interrupted; there, the call runs in its own thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    done = closed_gate()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by the caller
            errors.append(error)
        finally:
            done.release()

    try:
        start_thread(threading.Thread(target=run, name=CHANGE_THREAD, daemon=False))
    except RuntimeError:
        return call()  # the interpreter is exiting and starts no threads
    done.acquire()
    if errors:
        raise errors.pop()
    return results[0]


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. An interrupt meanwhile leaves a running thread, or none.

    ``Thread.start`` waits for the thread's first sign at a condition. An interrupt there can leave its lock held for
    ever: the thread never begins, and the interpreter waits for it at exit. So another thread does that waiting.

    Raises:
        RuntimeError: the interpreter is exiting, or the system is out of threads.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    errors: list[BaseException] = []
    begun = closed_gate()

    def begin() -> None:
        try:
            thread.start()
        except BaseException as error:  # raised again by the caller
            errors.append(error)
        finally:
            begun.release()

    _thread.start_new_thread(begin, ())
    begun.acquire()
    if errors:
        raise errors.pop()
