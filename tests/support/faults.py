"""Failing disks: the k-th call of a local directory to the operating system fails.

Only the modules of local directories are affected, so tests and their checks can use the disk meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from trajstore._core.files import descriptors, folders, held, local, local_locks
from trajstore._core.sessions import journal

Kind = Literal["ENOSPC", "EIO", "EACCES", "torn", "short"]
"""Kind of failure: this ``errno``; ``torn``: a write stores half of its bytes and then fails with ENOSPC;
``short``: a write stores only some of its bytes and reports so, without an error."""

KINDS: tuple[Kind, ...] = ("ENOSPC", "EIO", "EACCES", "torn", "short")

_COUNTED = ("open", "writev", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "unlink", "rmdir", "mkdir")

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT  # reads do not fail

_SLOW = ("fsync", "fdatasync")  # skipped: no power loss is simulated, and fsync would make a session ten times as long


@dataclass
class FaultPlan:
    """Which call fails, and the calls so far.

    Attributes:
        at: 0-based number of the failing call; None for none.
        kind: of the failure.
        lasting: all later calls fail too, until :meth:`heal`.
        calls: names of the calls made so far.
        fired: name of the first call that failed, None before that.
    """

    at: int | None = None
    kind: Kind = "EIO"
    lasting: bool = False
    calls: list[str] = field(default_factory=list)
    fired: str | None = None
    _healed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heal(self) -> None:
        """Make all later calls succeed."""
        self._healed = True

    def due(self, name: str) -> bool:
        """Count a call; return whether it must fail."""
        with self._lock:
            number = len(self.calls)
            self.calls.append(name)
            if self.at is None or self._healed or number < self.at:
                return False
            if number > self.at and not self.lasting:
                return False
            self.fired = self.fired or name
            return True


class FaultyOs:
    """The module ``os`` with calls that fail according to a plan."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return _failing(self._plan, name, real) if name in _COUNTED else real


def _failing(plan: FaultPlan, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        if name == "open" and arguments[1] & _WRITING == 0:
            return real(*arguments, **keywords)
        if not plan.due(name):
            if name in _SLOW:
                return None
            return real(*arguments, **keywords)
        if plan.kind == "short":
            written = _write_some(arguments[0], arguments[1]) if name == "writev" else 0
            return written or real(*arguments, **keywords)
        if plan.kind == "torn" and name == "writev":
            _write_some(arguments[0], arguments[1])
        code = errno.ENOSPC if plan.kind == "torn" else getattr(errno, plan.kind)
        names = [str(argument) for argument in arguments[:1] if isinstance(argument, str)]
        raise OSError(code, os.strerror(code), *names)

    return call


def _write_some(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Write half of the bytes of the first piece."""
    half = pieces[0].nbytes // 2
    return os.write(descriptor, pieces[0][:half]) if half else 0


@contextlib.contextmanager
def failing_disk(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Apply a plan of failures to local directories."""
    with contextlib.ExitStack() as patches:
        for module in (descriptors, folders, held, journal, local, local_locks):
            patches.enter_context(mock.patch.object(module, "os", FaultyOs(plan)))
        yield plan
