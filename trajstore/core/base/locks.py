"""The order of locks: who holds one takes only those after it, so that no two threads wait for each other.

``docs/design/locks.md`` says what each one guards. The order is checked where :func:`checked` is in force, which a
fixture of the tests sees to; elsewhere these are the locks of ``threading``, and cost what they cost.
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
    "Rewriter._one",
    "Sink.lock",
    "Points._one",
    "Inbox._one",
    "CommitLog._lock",
    "Prefetcher._changed",
    "DrawingHandle._lock",
    "Contents.lock",
    "RunningCopies._lock",
    "WriteQueue._lock",
    "CommitCallbacks._lock",
    "StoreMirror._lock",
    "Arena._lock",
    "Helpers._lock",
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
"""Locks of which one thread may hold those of several objects, and when."""


class Lock(Protocol):
    """What both kinds of lock of ``threading`` can do."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken."""

    def release(self) -> None:
        """Give the lock back."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *error: Any) -> None: ...


_DEPTH = 6
"""Calls that are told of each place."""

_breaches: list[str] | None = None
"""What was taken out of order; None while nothing is checked."""

_mine = threading.local()


@contextmanager
def checked() -> Iterator[list[str]]:
    """Check all locks that are made meanwhile; what is taken out of order is put into the list, with both places.

    Not for tests in which an exception may come at any moment: a lock that is checked is taken by code in Python,
    between two instructions of which it may come.
    """
    global _breaches
    before, _breaches = _breaches, []
    try:
        yield _breaches
    finally:
        _breaches = before


def lock(name: str) -> Lock:
    """Return a lock that its own thread cannot take again.

    Args:
        name: of ``ORDER``.
    """
    plain = threading.Lock()
    return plain if _breaches is None else _Checked(name, plain, _breaches)


def rlock(name: str) -> Lock:
    """Return a lock that its own thread may take again.

    Args:
        name: of ``ORDER``.
    """
    plain = threading.RLock()
    return plain if _breaches is None else _Checked(name, plain, _breaches)


def condition(name: str) -> threading.Condition:
    """Return a condition whose lock its own thread may take again.

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

    # What a condition asks of a lock that can be taken again.

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
    """Return the locks that this thread holds, and where it took each."""
    try:
        return _mine.held  # type: ignore[no-any-return]
    except AttributeError:
        _mine.held = []
        return _mine.held  # type: ignore[no-any-return]


def _place() -> list[tuple[str, int]]:
    """Return files and lines of the calls that take a lock, the outermost first; this file is left out."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < _DEPTH:
        if frame.f_code.co_filename != __file__:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _told(place: Sequence[tuple[str, int]]) -> str:
    return "\n".join(f"   {file}:{line}  {linecache.getline(file, line).strip()}" for file, line in place)
