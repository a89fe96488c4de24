"""Sparse local copies of remote files: mapped, and filled range by range as readers ask.

They share large unnamed files, so that few descriptors serve all of them. Data is written through a descriptor: that
costs less than through a map, and a full disk raises an error instead of killing the process.
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

from trajstore._core.base import locks
from trajstore._core.base.machine_code import kernels
from trajstore._core.files.base import Buffer
from trajstore._core.files.descriptors import Descriptor
from trajstore._core.files.filemap import FileMap, give_back, madvise, remap
from trajstore._core.files.read_cache import usable

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Unit of fetching in bytes: a page. Fetched ranges are aligned to it."""

JOINED = 128 << 10
"""Ranges at most this many bytes apart are fetched as one, since a request costs more. A response takes about 30 ms
and thirty are in flight, so a request costs the millisecond in which 1 Gbit/s carries this much."""

_OF_ONE_FILE = (4 << 30) - BLOCK
"""Size limit in bytes of a shared unnamed file, unless it has one map only; any file system supports it."""

Addresses = npt.NDArray[np.int64]
"""Addresses or sizes."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``[start, stop)`` of a file to fetch."""

    name: str
    start: int
    stop: int


Fetch = Callable[[Sequence[Range]], Generator[tuple[int, Buffer], None, None]]
"""Yields the index and bytes of each range as it arrives."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a partial file: an unnamed file and an offset in it."""

    file: Descriptor
    offset: int


class PartialMap(FileMap):
    """A map as large as a remote file, of which some blocks are fetched. Its data is freed with the map.

    Args:
        home: fetches the blocks.
        name: of the remote file.
        nbytes: its size.
        place: where the blocks are stored.

    Attributes:
        there: per block, whether it was fetched.
        marks: address of ``there``, which stays the same array.
        is_whole: whether all blocks are there.
        users: number of readings under way.
    """

    __slots__ = ("_pid", "_place", "home", "is_whole", "marks", "name", "there", "users")

    def __init__(self, home: PartialMaps, name: str, nbytes: int, place: Place) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE  # only writable pages can be freed
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
        """After a fork, remap to a private, empty place; the parent may empty its own."""
        if self._pid == os.getpid():
            return
        self._place = place(self.nbytes)
        remap(self.address, self._place.file.number, self.nbytes, self._place.offset)
        self.there[:] = self.is_whole = False
        self.users = 0
        self._pid = os.getpid()

    def lacking(self, starts: Addresses, sizes: Addresses) -> list[Range]:
        """Return the ranges to fetch for these bytes, neighbours joined.

        Args:
            starts: offset of each piece in the file, ``[n]``.
            sizes: of each piece in bytes, more than 0, ``[n]``.
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
        """Store a fetched range; return the number of bytes that are new.

        Raises:
            OSError: the disk is full.
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
        """Free all fetched blocks; return their size in bytes."""
        held = int(np.count_nonzero(self.there)) * BLOCK
        madvise(self.address, self.nbytes, mmap.MADV_REMOVE)
        self.there[:] = self.is_whole = False
        return held

    def __del__(self, getpid: Callable[[], int] = os.getpid, give_back: Callable[[int, int], None] = give_back) -> None:
        if getattr(self, "_pid", None) == getpid():  # else the blocks are the parent's
            give_back(self.address, self.nbytes)
        super().__del__()


class PartialMaps:
    """The partial files of one directory, bounded together. Thread-safe.

    Args:
        fetch: yields the bytes of ranges.
        folder: returns the folder for the blocks.
        limit: bytes of all blocks together. Files without a reading under way are emptied, the least recently used
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
        """Fetched bytes."""
        self.requests = 0
        """Fetched ranges."""
        self.batches = 0
        """Batches and trajectories that needed a fetch."""

    def map(self, name: str, nbytes: int) -> PartialMap:
        """Return an empty map of a file."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            return PartialMap(self, name, nbytes, self._place(nbytes))

    def _place(self, nbytes: int) -> Place:
        """Reserve a place for this many bytes."""
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
        """Fetch the missing pieces of memory, and keep all pieces during the block.

        Args:
            maps: the maps to read, of this directory.
            pieces: returns the address of each piece and its size in bytes, both ``[n]``; pieces outside the maps are
                ignored. Not called if all maps are whole.

        Raises:
            OSError: a fetch failed; names the file.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            for partial in maps:
                partial.own(self._place)
                partial.users += 1
        try:
            lacking = [partial for partial in maps if not partial.is_whole]
            if lacking:
                self._bring(lacking, *pieces())
            yield
        finally:
            with self._lock:
                for partial in maps:
                    partial.users -= 1
                    if id(partial) in self._used:  # also without a fetch: it is in use
                        self._used.move_to_end(id(partial))
                self._shrink()

    def _begin(self) -> None:
        """Start without files; in a forked child, a thread of the parent may have held the lock."""
        self._lock = locks.lock("PartialMaps._lock")
        self._held = 0
        self._file, self._end = None, 0  # the file for the next maps, and its end
        self._used: OrderedDict[int, weakref.ref[PartialMap]] = OrderedDict()
        self._pid = os.getpid()

    def _bring(self, maps: Sequence[PartialMap], addresses: Addresses, sizes: Addresses) -> None:
        ordered = sorted(maps, key=lambda part: part.address)
        bases = np.array([part.address for part in ordered], np.int64)
        ends = bases + np.array([part.nbytes for part in ordered], np.int64)
        marks = np.array([part.marks for part in ordered], np.int64)
        if kernels.are_there(addresses, sizes, bases, ends, marks, BLOCK):
            return  # the usual case: listing missing ranges costs as much as copying some rows
        owners = np.searchsorted(bases, addresses, side="right") - 1
        order = np.argsort(owners, kind="stable")
        edges = np.searchsorted(owners[order], np.arange(len(ordered) + 1))
        wanted: list[tuple[PartialMap, Range]] = []
        for number, part in enumerate(ordered):
            mine = order[edges[number] : edges[number + 1]]
            starts, lengths = addresses[mine] - part.address, sizes[mine]
            inside = (starts < part.nbytes) & (lengths > 0)
            wanted += [(part, piece) for piece in part.lacking(starts[inside], lengths[inside])]
        if not wanted:
            return
        with self._lock:
            self.batches += 1
            for part in ordered:
                self._used[id(part)] = weakref.ref(part)
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
                    f"{error.strerror}: no space for the fetched parts of {piece.name}; free some, or choose "
                    "another cache_dir or fewer cache_bytes",
                    str(self._folder()),
                ) from error
            self.fetched += len(data)
            self.requests += 1

    def _shrink(self) -> None:
        """Empty unused files until the rest is below the limit."""
        if self._held <= self._limit or self._unbounded:
            return
        self._held = sum(int(np.count_nonzero(partial.there)) * BLOCK for partial in self._living())
        for partial in self._living():
            if self._held <= self._limit:
                return
            if partial.users:
                continue
            try:
                self._held -= partial.empty()
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                self._unbounded = True
                logger.warning(
                    "%s: this file system cannot free parts of a file, so cache_bytes does not limit the fetched "
                    "parts of shards there (%s)",
                    self._folder(),
                    error,
                )
                return

    def _living(self) -> list[PartialMap]:
        """Return the live maps, the least recently used first."""
        living = []
        for key, reference in list(self._used.items()):
            partial = reference()
            if partial is None:
                del self._used[key]
            else:
                living.append(partial)
        return living


@contextmanager
def fetched(maps: Sequence[PartialMap], pieces: Callable[[], tuple[Addresses, Addresses]]) -> Iterator[None]:
    """Fetch the pieces of memory that are in these maps and keep them; see :meth:`PartialMaps.reading`.

    Raises:
        OSError: a fetch failed; names the file.
        CorruptStoreError: a file is gone.
    """
    with ExitStack() as readings:
        for home in dict.fromkeys(partial.home for partial in maps):
            readings.enter_context(home.reading([partial for partial in maps if partial.home is home], pieces))
        yield
