"""Memory that is used again: to touch fresh pages costs several times what copying into known ones does."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.base import locks

ALIGNMENT = 64

_LARGE = 4
"""A block of more than this part of a slab has memory of its own, so that little of a slab is left unused."""


def aligned(nbytes: int) -> int:
    """Return what a block of this many bytes takes: the next multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Lease:
    """Some memory for as long as anything refers to ``memory``, be it an array, a memoryview or a tensor.

    Attributes:
        memory: the bytes; views of them keep the lease.
        data: the same, as a memoryview.
        address: address of the first byte, a multiple of 64.
    """

    __slots__ = ("address", "data", "memory")

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        buffer: Any = block.data
        # Not a slice of the block: views of a slice refer to the block itself, and the last one could not be told.
        self.memory = np.frombuffer(buffer, np.uint8)
        view: Any = self.memory
        self.data = memoryview(view)
        self.address = int(block.ctypes.data)


def _allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return fresh memory that begins at a multiple of 64."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + max(nbytes, 1)]


class Arena:
    """Hands out blocks of slabs; a slab comes back by itself when nothing refers to any of its blocks.

    Meant for blocks that are let go in about the order in which they were taken. Safe to call from several threads.

    Args:
        slab_bytes: size of a slab; 0 gives every block memory of its own.
        spare: most slabs that are kept while nobody uses them.
    """

    def __init__(self, slab_bytes: int, spare: int = 2) -> None:
        self._slab_bytes = aligned(slab_bytes)
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=spare)
        self._lock = locks.lock("Arena._lock")
        self._lease: Lease | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[Lease, int]:
        """Return memory and the offset in it at which ``nbytes`` bytes, uninitialised, are the caller's."""
        if nbytes * _LARGE > self._slab_bytes:
            return Lease(_allocate(nbytes)), 0
        nbytes = aligned(nbytes)
        with self._lock:
            if self._lease is None or self._used + nbytes > self._slab_bytes:
                self._lease = self._new_lease()
                self._used = 0
            offset = self._used
            self._used += nbytes
            return self._lease, offset

    def _new_lease(self) -> Lease:
        try:
            slab = self._spare.pop()
        except IndexError:
            slab = _allocate(self._slab_bytes)
        lease = Lease(slab)
        # The finalizer refers to the slab, not to the arena, and may run in any thread at any moment.
        weakref.finalize(lease.memory, self._spare.append, slab).atexit = False
        return lease
