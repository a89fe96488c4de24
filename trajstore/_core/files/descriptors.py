"""Open descriptors of files and folders, closed when unreferenced or, for locks, after a fork; writing to them."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Iterable, Iterator

from trajstore._core.files.base import Buffer


class Descriptor:
    """An open file or folder, closed when this object is garbage-collected.

    Args:
        number: the descriptor, owned by this object from now on.
        of_process: for locks: a forked child closes its copy at once. The system releases a lock when the last copy
            of its descriptor is closed, so a child that outlives its parent would keep the lock.

    Attributes:
        number: for system calls; -1 once it is closed, which they refuse.
        is_open: True until it is closed.
    """

    __slots__ = ("__weakref__", "is_open", "number")

    def __init__(self, number: int, *, of_process: bool = False) -> None:
        self.number = number
        self.is_open = True
        if of_process:
            _of_process.add(self)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close it. Closing again does nothing."""
        if self.is_open:
            self.is_open, number, self.number = False, self.number, -1
            close(number)

    def __del__(self) -> None:
        self.close()


_of_process: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptor in list(_of_process):
        descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)


_IOV_MAX = 512
_MERGE_BELOW = 4096


def write_all(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write pieces in order, in as few system calls as possible."""
    for batch in _batches(pieces):
        remaining = [piece for piece in batch if piece.nbytes]
        while remaining:
            written = os.writev(descriptor, remaining)
            if written == 0:
                raise OSError(errno.EIO, "no bytes could be written")
            while remaining and written >= remaining[0].nbytes:
                written -= remaining.pop(0).nbytes
            if written:
                remaining[0] = remaining[0][written:]


def _batches(pieces: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Group pieces for ``writev``; runs of small pieces are merged, which is cheaper than passing each."""
    batch: list[memoryview] = []
    small: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece).cast("B") if memoryview(piece).nbytes else memoryview(b"")
        if view.nbytes < _MERGE_BELOW:
            small.append(view)
            continue
        if small:
            batch.append(memoryview(b"".join(small)))
            small = []
        batch.append(view)
        if len(batch) >= _IOV_MAX:
            yield batch
            batch = []
    if small:
        batch.append(memoryview(b"".join(small)))
    if batch:
        yield batch
