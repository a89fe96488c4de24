"""Writing many pieces to a file in few system calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from trajstore.core.files.base import Buffer

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
