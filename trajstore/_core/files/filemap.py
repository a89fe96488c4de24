"""Read-only memory maps that keep no descriptor.

``mmap.mmap`` duplicates the descriptor of each mapped file (``trackfd=False`` needs Python 3.13), which would limit a
process to as many maps as open files. These maps call libc's ``mmap``, which needs no descriptor afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MAP_FIXED = 0x10

_FAILED = 2 * sys.maxsize + 1  # MAP_FAILED, (void *) -1


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Advise the kernel on the use of mapped pages.

    Raises:
        OSError: the kernel does not support this advice.
    """
    if nbytes and _madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def give_back(address: int, nbytes: int, advise: Any = _madvise, advice: int = mmap.MADV_REMOVE) -> None:
    """Free the disk space of pages mapped for writing, where the file system supports it.

    Works during interpreter shutdown too, when modules are gone.
    """
    advise(address, nbytes, advice)


def remap(address: int, descriptor: int, nbytes: int, offset: int) -> None:
    """Map another file, from an offset on, at the address of one mapped for writing.

    Raises:
        OSError: it cannot be mapped.
    """
    if not nbytes:
        return
    flags = mmap.MAP_SHARED | _MAP_FIXED
    mapped = _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if mapped in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class FileMap:
    """A whole file, mapped read-only, unmapped when this object and all its views are gone.

    Args:
        descriptor: of the open file; may be closed afterwards.
        nbytes: size of the file.
        sequential: the file will be read from beginning to end. Otherwise rows are drawn at random, and readahead
            is switched off.
        protection: of the pages, as for ``mmap``.
        offset: of the first byte in the file; a multiple of the page size.

    Attributes:
        address: of the first byte; 0 if the file is empty.
        nbytes: size of the file.

    Raises:
        OSError: the file cannot be mapped, or the process has too many maps.
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(
        self,
        descriptor: int,
        nbytes: int,
        *,
        sequential: bool = False,
        protection: int = mmap.PROT_READ,
        offset: int = 0,
    ) -> None:
        self.address = 0
        self.nbytes = nbytes
        if not nbytes:
            return  # mmap refuses empty maps
        address = _mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, offset)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address = address
        _madvise(address, nbytes, mmap.MADV_SEQUENTIAL if sequential else mmap.MADV_RANDOM)

    def __len__(self) -> int:
        return self.nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Numpy's array protocol; the array keeps this object as its base."""
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, True)}

    @property
    def view(self) -> memoryview:
        """The bytes, read-only; keeps the file mapped."""
        return np.asarray(self).data if self.nbytes else memoryview(b"")

    def __del__(self, munmap: Any = _munmap) -> None:
        if getattr(self, "address", 0):  # 0 or absent: nothing was mapped
            munmap(self.address, self.nbytes)
            self.address = 0
