"""Memory that was given back cannot be read: to use it afterwards ends the process, every time and at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.memory import Arena, Lease
from trajstore._core.files.filemap import FileMap
from trajstore._core.reading.address_table import AddressTable, MappedShard, Rows, RunningCopies

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = 2 * sys.maxsize + 1
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED, _PROT_NONE = 0x10, 0

_MOST = 20_000
"""How many pieces of memory stay unreadable; the system knows some 65,000 maps of a process."""

_withdrawn: deque[tuple[int, int]] = deque()


def _map(address: int | None, nbytes: int, protection: int, flags: int) -> int:
    found = _mmap(address, nbytes, protection, flags, -1, 0)
    if found in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def withdraw(address: int, nbytes: int) -> None:
    """Put pages in the place of mapped ones that cannot be read; the addresses stay taken."""
    if not nbytes:
        return
    _map(address, nbytes, _PROT_NONE, _PRIVATE | _MAP_FIXED)
    _withdrawn.append((address, nbytes))
    if len(_withdrawn) > _MOST:
        _munmap(*_withdrawn.popleft())


class _Pages:
    """Memory of its own, which cannot be read once this object and all its views are gone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.address = _map(None, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False)}

    def __del__(self) -> None:
        withdraw(self.address, self.nbytes)


def _pages(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.asarray(_Pages(nbytes))


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in memory of its own."""
    copy = torch.from_numpy(_pages(tensor.nbytes))[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
    return copy.copy_(tensor)


@contextmanager
def released_is_unreadable() -> Iterator[None]:
    """Let maps of files, memory of waiting trajectories and decoded ones end as unreadable pages; for what begins now.

    Numbers of slots are not given out again either: a late copy finds released memory under one.
    """
    add_memory, prepare = AddressTable.add_memory, RunningCopies.__init__

    def unmap(self: FileMap) -> None:
        withdraw(self.address, self.nbytes)
        self.address = 0

    def take(_: Arena, nbytes: int) -> tuple[Lease, int]:
        return Lease(_pages(nbytes)), 0

    def add_moved(self: AddressTable, rows: Rows, entries: int) -> int:
        if isinstance(rows, MappedShard):
            tensors = [_moved(tensor) for tensor in rows.keep]
            rows = replace(rows, addresses=[tensor.data_ptr() for tensor in tensors], keep=tensors)
        return add_memory(self, rows, entries)

    def keep_numbers(self: RunningCopies, _: Any) -> None:
        prepare(self, lambda slots: None)

    with ExitStack() as patches:
        patches.enter_context(patch.object(FileMap, "__del__", unmap))
        patches.enter_context(patch.object(Arena, "take", take))
        patches.enter_context(patch.object(AddressTable, "add_memory", add_moved))
        patches.enter_context(patch.object(RunningCopies, "__init__", keep_numbers))
        yield
