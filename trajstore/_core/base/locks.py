"""The order of locks: a thread acquires only locks after those it holds, so there are no deadlocks.

``docs/design/locks.md`` lists the state that each one guards. The order is checked inside :func:`checked`, which a
test fixture enters; elsewhere these are plain locks of ``threading``, at their cost.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

ORDER = (
    "Outbox._lock",
    "Reads._lock",
    "Hold._changed",
    "StoreServer._adding",
    "StoreServer._rolling",
    "LocalMaker._adding",
    "RetrievalIndex._using",
    "UpdateQueue._lock",
    "ExperienceWorker._lock",
    "EMClient._lock",
    "Trouble._lock",
    "Background._lock",
    "View.steady",
    "StoreWriter._close_lock",
    "BufferSessions._adding",
    "Sessions._lock",
    "Session._lock",
    "CallJournal._writing",
    "CallJournal._lock",
    "Rewriter._one",
    "Sink.lock",
    "Points._one",
    "Inbox._one",
    "CommitLog._lock",
    "Ledger._changing",
    "Prefetcher._changed",
    "RateLimiter._changed",
    "DrawingHandle._lock",
    "Contents.lock",
    "RunningCopies._lock",
    "WriteQueue._lock",
    "CommitCallbacks._lock",
    "StoreMirror._lock",
    "Arena._lock",
    "StringTable._lock",
    "PartialMaps._lock",
    "ReadCache._mutex",
    "_Download.lock",
    "LocalDirectory._mutex",
    "LocalWriterLock._mutex",
    "HeldFolder._mutex",
    "RemoteReaderLease._mutex",
    "RemoteWriterLock._mutex",
    "_Readings._at",
    "MachineCode._lock",
)
"""Class and attribute of every lock, the outermost first."""

SEVERAL = {
    "Contents.lock": "of all buffers at once, before the process forks",
    "RunningCopies._lock": "of all buffers at once, before the process forks",
    "HeldFolder._mutex": "a folder's, then that of the folder in which it lies",
}
"""Locks that one thread may hold for several objects, and when."""


class Lock(Protocol):
    """Interface of both kinds of lock of ``threading``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; return whether it was acquired."""

    def release(self) -> None:
        """Release the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *error: Any) -> None: ...


_DEPTH = 6
"""Stack frames shown per acquisition."""

_breaches: list[str] | None = None
"""Violations of the order; None while nothing is checked."""

_mine = threading.local()


@contextmanager
def checked() -> Iterator[list[str]]:
    """Check all locks made in the block; yield the list of violations, each with both places.

    Not for tests with asynchronous exceptions: a checked lock is acquired by Python code, which they may
    interrupt.
    """
    global _breaches
    before, _breaches = _breaches, []
    try:
        yield _breaches
    finally:
        _breaches = before


def lock(name: str) -> Lock:
    """Return a non-reentrant lock.

    Args:
        name: of ``ORDER``.
    """
    plain = threading.Lock()
    return plain if _breaches is None else _Checked(name, plain, _breaches)


def rlock(name: str) -> Lock:
    """Return a reentrant lock.

    Args:
        name: of ``ORDER``.
    """
    plain = threading.RLock()
    return plain if _breaches is None else _Checked(name, plain, _breaches)


def condition(name: str) -> threading.Condition:
    """Return a condition with a reentrant lock.

    Args:
        name: of ``ORDER``.
    """
    made: Any = rlock(name)
    return threading.Condition(made)


class _Checked:
    """A lock that knows its place in the order."""

    def __init__(self, name: str, plain: Any, breaches: list[str]) -> None:
        self._name = name
        self._rank = ORDER.index(name)
        self._plain = plain
        self._breaches = breaches

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = _held()
        if blocking and not any(other is self for other, _ in held):
            for other, where in held:
                if other._rank > self._rank or (other._rank == self._rank and self._name not in SEVERAL):
                    self._breaches.append(
                        f"{self._name} is taken while {other._name} is held\n"
                        f"{other._name} was taken at\n{_told(where)}\n{self._name} at\n{_told(_place())}"
                    )
        taken = bool(self._plain.acquire(blocking, timeout))
        if taken:
            held.append((self, _place()))
        return taken

    def release(self) -> None:
        self._plain.release()
        held = _held()
        for at in range(len(held) - 1, -1, -1):
            if held[at][0] is self:
                del held[at]
                return

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()

    # Methods that a condition needs from a reentrant lock.

    def _is_owned(self) -> bool:
        return bool(self._plain._is_owned())

    def _release_save(self) -> Any:
        held = _held()
        mine = [entry for entry in held if entry[0] is self]
        held[:] = [entry for entry in held if entry[0] is not self]
        return self._plain._release_save(), mine

    def _acquire_restore(self, state: Any) -> None:
        self._plain._acquire_restore(state[0])
        _held().extend(state[1])


def _held() -> list[tuple[_Checked, list[tuple[str, int]]]]:
    """Return the locks that this thread holds, with the place of each acquisition."""
    try:
        return _mine.held  # type: ignore[no-any-return]
    except AttributeError:
        _mine.held = []
        return _mine.held  # type: ignore[no-any-return]


def _place() -> list[tuple[str, int]]:
    """Return files and lines of the calling stack frames, the outermost first, without this file."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < _DEPTH:
        if frame.f_code.co_filename != __file__:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _told(place: Sequence[tuple[str, int]]) -> str:
    return "\n".join(f"   {file}:{line}  {linecache.getline(file, line).strip()}" for file, line in place)
