"""Read-only maps of files that keep no descriptor.

``mmap.mmap`` duplicates the descriptor of each file that it maps (``trackfd=False`` exists from Python 3.13 on), so a
process could map no more files than it may open. The system itself needs none: these maps are made through libc.
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
    """Tell the system what becomes of mapped pages.

    Raises:
        OSError: it does not do that.
    """
    if nbytes and _madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def give_back(address: int, nbytes: int, advise: Any = _madvise, advice: int = mmap.MADV_REMOVE) -> None:
    """Give the disk back what pages hold that are mapped for writing, where the file system can do that.

    Also while the interpreter ends, when modules are gone.
    """
    advise(address, nbytes, advice)


def remap(address: int, descriptor: int, nbytes: int, offset: int) -> None:
    """Put another file, from an offset on, in place of one that is mapped for writing.

    Raises:
        OSError: it cannot be mapped.
    """
    if not nbytes:
        return
    flags = mmap.MAP_SHARED | _MAP_FIXED
    found = _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if found in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class FileMap:
    """A whole file in memory, read-only. It is unmapped when this object and all its views are gone.

    Args:
        descriptor: of the open file; may be closed afterwards.
        nbytes: size of the file.
        sequential: the file will be read from beginning to end. Otherwise rows are drawn at random, and reading ahead
            would read what nobody wants.
        protection: of the pages, as the system's ``mmap`` takes it.
        offset: in the file, of the first byte; a whole number of pages.

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
            return  # an empty map is an error to the system
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
        """What numpy makes an array of, whose base is this object."""
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, True)}

    @property
    def view(self) -> memoryview:
        """The bytes, read-only; keeps the map."""
        return np.asarray(self).data if self.nbytes else memoryview(b"")

    def __del__(self, munmap: Any = _munmap) -> None:
        if getattr(self, "address", 0):  # 0 or absent: nothing was mapped
            munmap(self.address, self.nbytes)
            self.address = 0
