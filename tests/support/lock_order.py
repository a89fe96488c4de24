"""Checks that threads take locks in the order of the table in ``docs/design/store.md``."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.pages import section
from trajstore._core.base import locks

PAGE = Path(__file__).parents[2] / "docs" / "design" / "store.md"
TABLE = re.findall(
    r"^\| `([A-Za-z_.]+)` \| `([a-z_/]+)` \| .+ \|$", section(PAGE.read_text(), "Order of locks"), re.MULTILINE
)
"""Name (class and attribute) and module of every lock, the outermost first."""

RANKS = {name: rank for rank, (name, _) in enumerate(TABLE)}

SEVERAL = ("Contents.lock", "RunningCopies._lock", "HeldFolder._mutex")
"""Locks that one thread may hold for several objects: of all buffers before a fork, of a folder and the one above."""

_DEPTH = 6
"""Stack frames shown per acquisition."""

_mine = threading.local()


@contextmanager
def checked() -> Iterator[list[str]]:
    """Check all locks made in the block; yield the list of violations, each with both places.

    Not for tests with asynchronous exceptions: a checked lock is acquired by Python code, which they may interrupt.
    """
    breaches: list[str] = []
    before, locks.checker = locks.checker, partial(_Checked, breaches)
    try:
        yield breaches
    finally:
        locks.checker = before


class _Checked:
    """A lock that knows its place in the order."""

    def __init__(self, breaches: list[str], name: str, plain: Any) -> None:
        self._name = name
        self._rank = RANKS[name]
        self._plain = plain
        self._breaches = breaches

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = _held()
        if blocking and not any(other is self for other, _ in held):
            for other, where in held:
                if other._rank > self._rank or (other._rank == self._rank and self._name not in SEVERAL):
                    self._breaches.append(
                        f"{self._name} is taken while {other._name} is held\n"
                        f"{other._name} was taken at\n{_lines(where)}\n{self._name} at\n{_lines(_place())}"
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
    places: list[tuple[str, int]] = []
    while frame is not None and len(places) < _DEPTH:
        if frame.f_code.co_filename not in (__file__, locks.__file__, threading.__file__):
            places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return places[::-1]


def _lines(place: Sequence[tuple[str, int]]) -> str:
    return "\n".join(f"   {file}:{line}  {linecache.getline(file, line).strip()}" for file, line in place)
