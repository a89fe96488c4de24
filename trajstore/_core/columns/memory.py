"""Reusable memory: touching fresh pages costs several times as much as copying into used ones."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks

ALIGNMENT = 64

_LARGE = 4
"""A block larger than 1/_LARGE of a slab gets its own memory, so that little of a slab is wasted."""


def aligned(nbytes: int) -> int:
    """Round a size up to a multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Lease:
    """Memory that stays reserved while anything refers to ``memory``: an array, a memoryview or a tensor.

    Attributes:
        memory: the bytes; views of them keep the lease.
        data: the same, as a memoryview.
        address: address of the first byte, a multiple of 64.
    """

    __slots__ = ("address", "data", "memory")

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        buffer: Any = block.data
        # Not a slice of the block: views of a slice refer to the block itself, so the last one would go unnoticed.
        self.memory = np.frombuffer(buffer, np.uint8)
        view: Any = self.memory
        self.data = memoryview(view)
        self.address = int(block.ctypes.data)


def _allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return fresh memory, 64-byte aligned."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + max(nbytes, 1)]


class Arena:
    """Hands out blocks of slabs; a slab is reused once nothing refers to any of its blocks.

    Meant for blocks that are freed in about the order of allocation. Thread-safe.

    Args:
        slab_bytes: size of a slab; 0 gives every block its own memory.
        spare: largest number of unused slabs to keep.
    """

    def __init__(self, slab_bytes: int, spare: int = 2) -> None:
        self._slab_bytes = aligned(slab_bytes)
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=spare)
        self._lock = locks.lock("Arena._lock")
        self._lease: Lease | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[Lease, int]:
        """Allocate ``nbytes`` uninitialised bytes; return the memory and their offset in it."""
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
