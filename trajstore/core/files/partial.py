"""Files of which only what is asked for has been fetched: mapped, with holes, and filled range by range.

They lie one after another in large files without a name, so that few descriptors do for all of them. What is written
through a descriptor costs less than through a map, and a full disk is an error there, not the end of the process.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajstore.core.base import locks
from trajstore.core.base.machine_code import kernels
from trajstore.core.files.base import Buffer
from trajstore.core.files.descriptors import Descriptor
from trajstore.core.files.filemap import FileMap, give_back, madvise, remap
from trajstore.core.files.read_cache import usable

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Bytes that are there or not, as one: a page. What is fetched begins and ends with one."""

JOINED = 128 << 10
"""Ranges that lie no further apart than this many bytes are fetched as one: a request costs more. An answer takes some
30 ms and thirty are under way, so a request takes the millisecond in which 1 Gbit/s carries this much."""

_OF_ONE_FILE = (4 << 30) - BLOCK
"""Bytes of a file in which others lie, unless it is one alone: any file system takes as many."""

Addresses = npt.NDArray[np.int64]
"""Addresses or sizes."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``[start, stop)`` of a file that are to be fetched."""

    name: str
    start: int
    stop: int


Fetch = Callable[[Sequence[Range]], Generator[tuple[int, Buffer], None, None]]
"""Yields which range has come, and its bytes, while others are under way."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a partly fetched file lies: in which file without a name, and from which byte on."""

    file: Descriptor
    offset: int


class PartialMap(FileMap):
    """A file as large as one elsewhere, whose blocks are there or not. What was fetched ends with its map.

    Args:
        home: fetches.
        name: of the file elsewhere.
        nbytes: its size.
        place: where the blocks lie.

    Attributes:
        there: per block, whether it was fetched.
        marks: address of ``there``, which stays the same array.
        is_whole: whether all of them were.
        users: readings that go on.
    """

    __slots__ = ("_pid", "_place", "home", "is_whole", "marks", "name", "there", "users")

    def __init__(self, home: PartialMaps, name: str, nbytes: int, place: Place) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE  # what is not writable cannot be emptied
        super().__init__(place.file.number, nbytes, protection=protection, offset=place.offset)
        self.home = home
        self.name = name
        self.there: npt.NDArray[np.bool_] = np.zeros(-(-nbytes // BLOCK), np.bool_)
        self.marks: int = self.there.ctypes.data
        self.is_whole = not nbytes
        self.users = 0
        self._place = place
        self._pid = os.getpid()

    def own(self, place: Callable[[int], Place]) -> None:
        """In a forked child, take an empty place of its own instead of its parent's, which the parent may empty."""
        if self._pid == os.getpid():
            return
        self._place = place(self.nbytes)
        remap(self.address, self._place.file.number, self.nbytes, self._place.offset)
        self.there[:] = self.is_whole = False
        self.users = 0
        self._pid = os.getpid()

    def lacking(self, starts: Addresses, sizes: Addresses) -> list[Range]:
        """Return what has to be fetched of these bytes, neighbours joined.

        Args:
            starts: of each piece within the file, ``[n]``.
            sizes: of each in bytes, more than 0, ``[n]``.
        """
        first, last = starts // BLOCK, (starts + sizes - 1) // BLOCK
        counts = last - first + 1
        blocks = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
        blocks = np.unique(blocks[~self.there[blocks]])
        if not len(blocks):
            return []
        breaks = np.flatnonzero(np.diff(blocks) > JOINED // BLOCK + 1) + 1
        begins, ends = blocks[np.append(0, breaks)], blocks[np.append(breaks - 1, len(blocks) - 1)] + 1
        return [
            Range(self.name, begin * BLOCK, min(end * BLOCK, self.nbytes))
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        ]

    def fill(self, piece: Range, data: Buffer) -> int:
        """Take in a range that was fetched; return how many bytes are there that were not.

        Raises:
            OSError: there is no space for it.
        """
        view, offset = memoryview(data), self._place.offset + piece.start
        while view:
            written = os.pwrite(self._place.file.number, view, offset)
            view, offset = view[written:], offset + written
        blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        new = int(np.count_nonzero(~self.there[blocks]))
        self.there[blocks] = True
        self.is_whole = bool(self.there.all())
        return new * BLOCK

    def empty(self) -> int:
        """Give everything back that was fetched; return how many bytes it was."""
        held = int(np.count_nonzero(self.there)) * BLOCK
        madvise(self.address, self.nbytes, mmap.MADV_REMOVE)
        self.there[:] = self.is_whole = False
        return held

    def __del__(self, getpid: Callable[[], int] = os.getpid, give_back: Callable[[int, int], None] = give_back) -> None:
        if getattr(self, "_pid", None) == getpid():  # else the blocks are the parent's
            give_back(self.address, self.nbytes)
        super().__del__()


class PartialMaps:
    """The partly fetched files of one directory, together bounded. Safe to call from several threads.

    Args:
        fetch: yields the bytes of ranges.
        folder: returns where blocks lie.
        limit: bytes of all blocks together. Files that nobody reads at the moment are emptied, the least recently used
            first.
    """

    _file: Descriptor | None
    _end: int

    def __init__(self, fetch: Fetch, folder: Callable[[], Path], limit: int) -> None:
        self._fetch = fetch
        self._folder = folder
        self._limit = limit
        self._begin()
        self._unbounded = False
        self.fetched = 0
        """Bytes that were fetched."""
        self.requests = 0
        """Ranges that were fetched."""
        self.batches = 0
        """Batches and trajectories for which something had to be fetched."""

    def map(self, name: str, nbytes: int) -> PartialMap:
        """Return a file of which nothing is there yet."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            return PartialMap(self, name, nbytes, self._place(nbytes))

    def _place(self, nbytes: int) -> Place:
        """Return where so many bytes can lie."""
        size = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        folder = self._folder()
        with usable(folder):
            if self._file is None or self._end + size > _OF_ONE_FILE:
                with tempfile.TemporaryFile(dir=folder) as file:
                    self._file, self._end = Descriptor(os.dup(file.fileno())), 0
            place = Place(self._file, self._end)
            os.truncate(self._file.number, self._end + size)
        self._end += size
        return place

    @contextmanager
    def reading(self, maps: Sequence[PartialMap], pieces: Callable[[], tuple[Addresses, Addresses]]) -> Iterator[None]:
        """Fetch what lacks of pieces of memory, and keep it there meanwhile.

        Args:
            maps: those that are read, of this directory.
            pieces: returns the address of each piece and its size in bytes, both ``[n]``; those outside of the maps are
                passed over. Not called if everything is there.

        Raises:
            OSError: something could not be fetched; names the file.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            for one in maps:
                one.own(self._place)
                one.users += 1
        try:
            lacking = [one for one in maps if not one.is_whole]
            if lacking:
                self._bring(lacking, *pieces())
            yield
        finally:
            with self._lock:
                for one in maps:
                    one.users -= 1
                    if id(one) in self._used:  # also one that needed nothing: it is in use all the same
                        self._used.move_to_end(id(one))
                self._shrink()

    def _begin(self) -> None:
        """Know of no files; in a forked child, one of the parent's threads may have held the lock."""
        self._lock = locks.lock("PartialMaps._lock")
        self._held = 0
        self._file, self._end = None, 0  # in which the next ones lie, and from where on
        self._used: OrderedDict[int, weakref.ref[PartialMap]] = OrderedDict()
        self._pid = os.getpid()

    def _bring(self, maps: Sequence[PartialMap], addresses: Addresses, sizes: Addresses) -> None:
        ordered = sorted(maps, key=lambda one: one.address)
        bases = np.array([one.address for one in ordered], np.int64)
        ends = bases + np.array([one.nbytes for one in ordered], np.int64)
        marks = np.array([one.marks for one in ordered], np.int64)
        if kernels.are_there(addresses, sizes, bases, ends, marks, BLOCK):
            return  # as almost always: to list what lacks costs as much as to copy some rows
        owners = np.searchsorted(bases, addresses, side="right") - 1
        order = np.argsort(owners, kind="stable")
        edges = np.searchsorted(owners[order], np.arange(len(ordered) + 1))
        wanted: list[tuple[PartialMap, Range]] = []
        for number, one in enumerate(ordered):
            mine = order[edges[number] : edges[number + 1]]
            starts, lengths = addresses[mine] - one.address, sizes[mine]
            inside = (starts < one.nbytes) & (lengths > 0)
            wanted += [(one, piece) for piece in one.lacking(starts[inside], lengths[inside])]
        if not wanted:
            return
        with self._lock:
            self.batches += 1
            for one in ordered:
                self._used[id(one)] = weakref.ref(one)
        with closing(self._fetch([piece for _, piece in wanted])) as arriving:
            for place, data in arriving:
                self._take(*wanted[place], data)

    def _take(self, one: PartialMap, piece: Range, data: Buffer) -> None:
        with self._lock:
            try:
                self._held += one.fill(piece, data)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: no place for what was fetched of {piece.name}; free some, or choose "
                    "another cache_dir or fewer cache_bytes",
                    str(self._folder()),
                ) from error
            self.fetched += len(data)
            self.requests += 1

    def _shrink(self) -> None:
        """Empty files that nobody reads until the rest is below the limit."""
        if self._held <= self._limit or self._unbounded:
            return
        self._held = sum(int(np.count_nonzero(one.there)) * BLOCK for one in self._living())
        for one in self._living():
            if self._held <= self._limit:
                return
            if one.users:
                continue
            try:
                self._held -= one.empty()
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                self._unbounded = True
                logger.warning(
                    "%s: this file system gives no part of a file back: what was fetched of shards is not bounded by "
                    "cache_bytes there (%s)",
                    self._folder(),
                    error,
                )
                return

    def _living(self) -> list[PartialMap]:
        """Return the files that are mapped still, the least recently used first."""
        found = []
        for key, reference in list(self._used.items()):
            one = reference()
            if one is None:
                del self._used[key]
            else:
                found.append(one)
        return found


@contextmanager
def fetched(maps: Sequence[PartialMap], pieces: Callable[[], tuple[Addresses, Addresses]]) -> Iterator[None]:
    """Let pieces of memory be there meanwhile, as far as they lie in these maps; see :meth:`PartialMaps.reading`.

    Raises:
        OSError: something could not be fetched; names the file.
        CorruptStoreError: a file is gone.
    """
    with ExitStack() as readings:
        for home in dict.fromkeys(one.home for one in maps):
            readings.enter_context(home.reading([one for one in maps if one.home is home], pieces))
        yield
