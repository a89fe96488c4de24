"""The interface of a store's directory, local or remote.

Names are relative and ``/``-separated. ``local`` implements the durable local directory, ``remote`` the one over
fsspec; ``opening`` chooses.
"""

from __future__ import annotations

import errno
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from trajstore._core.files.filemap import FileMap
from trajstore.errors import UnsafeContentError

READ_LIMIT = 16 << 30
"""Largest file in bytes that :meth:`Directory.read` reads: index and log of some hundred million trajectories."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk or quota, or a file above the size limit (``ulimit -f``)."""

SEE_VERIFY = "; `trajstore verify` says what else is"
"""Ending of the error that reports a missing file to readers."""

_SAFE_NAME = re.compile(r"(?![A-Za-z]:)[^\x00-\x1f\x7f\\]+")
_UNSAFE = frozenset(("", ".", ".."))


def check_name(name: str, *, one_part: bool = False) -> str:
    """Return ``name`` if it stays below its directory; with ``one_part``, if it has no folder.

    Raises:
        UnsafeContentError: the name is absolute, has ``..`` or empty parts, or control characters.
    """
    parts = name.split("/")
    if one_part and len(parts) > 1:
        raise UnsafeContentError(f"file name {name!r} leaves the directory; the index was not written by trajstore")
    if not _SAFE_NAME.fullmatch(name) or not _UNSAFE.isdisjoint(parts):
        raise UnsafeContentError(f"file name {name!r} leaves the directory; the index was not written by trajstore")
    return name


def is_safe_name(name: str) -> bool:
    """Return whether :func:`check_name` accepts a name."""
    try:
        check_name(name)
    except UnsafeContentError:
        return False
    return True


Buffer = bytes | bytearray | memoryview
"""Any contiguous bytes that can be written."""


def crc32_of(pieces: Sequence[Buffer]) -> int:
    """Return the CRC-32 of consecutive pieces."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """A file to write: its name and its content in order. Pieces may alias the caller's memory."""

    name: str
    pieces: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(memoryview(piece).nbytes for piece in self.pieces)


Listed = Mapping[str, Mapping[str, str]]
"""Versions of files, by folder and by name in it."""


def version_in(versions: Mapping[str, str], files: Sequence[str], after: str) -> str | None:
    """Return :meth:`Directory.version` from the versions of a directory's files, by name."""
    following = min((name for name in versions if name > after), default=None)
    return versions[following] if following == files[-1] else None


class WriterLock(ABC):
    """Lock of a directory's only writer; released by ``release()`` or the process's death."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock. Releasing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class ReaderLease:
    """Protects the files that a reader needs; this base class protects nothing, for directories without leases.

    A new lease is looking: it protects its first generation and all newer ones, until :meth:`settle`.
    """

    def notice(self) -> None:
        """Take the lease now if that had no use before."""

    def look(self) -> None:
        """Protect all newer generations too, before reading one.

        Raises:
            OSError: they cannot be protected; what is shown still is.
        """

    def settle(self, generation: int) -> None:
        """Protect only the generation that is shown now."""

    def release(self) -> None:
        """Release all protected files. Releasing again does nothing."""


class LateLease(ReaderLease):
    """Of a directory that nobody has written in place (a checkpoint, a copy): a lease once a writer has begun there.

    Args:
        announce: ``announce_reader`` of the directory.
        generation: that is read.
    """

    def __init__(self, announce: Callable[[int], ReaderLease], generation: int) -> None:
        self._announce, self._generation, self._lease = announce, generation, ReaderLease()

    def notice(self) -> None:
        if type(self._lease) is ReaderLease and not isinstance(lease := self._announce(self._generation), LateLease):
            self._lease = lease
            lease.settle(self._generation)

    def look(self) -> None:
        self._lease.look()

    def settle(self, generation: int) -> None:
        self._generation = generation
        self._lease.settle(generation)

    def release(self) -> None:
        self._lease.release()


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader, as its lease describes it to the writer.

    Attributes:
        name: of its lease.
        generation: that it shows.
        settled: True if it needs only that generation; False while it looks for a newer one.
        holder: process, host and start time, for error messages.
        process: process and host, the same for all leases of a process.
    """

    name: str
    generation: int
    settled: bool
    holder: str
    process: str


class Directory(ABC):
    """A directory of immutable files, published atomically, and of append-only log segments.

    All methods are thread-safe. I/O failures are ``OSError`` whose message names the file; ``FileNotFoundError`` when
    it is absent. A folder, pipe, socket, device or symbolic link in a circle in place of a file is
    ``CorruptStoreError``; symbolic links to files are followed.
    """

    can_append: ClassVar[bool]
    """Whether ``append`` works; otherwise each commit publishes its own log segment."""

    @property
    def reads_ranges(self) -> bool:
        """Whether :meth:`map_rows` fetches less than whole files."""
        return False

    @property
    @abstractmethod
    def url(self) -> str:
        """Path or URL, for messages."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the directory itself exists (remote: whether any file is below it)."""

    @abstractmethod
    def create(self, folders: Sequence[str] = ()) -> None:
        """Create the directory, its parents and these folders in it, if absent; their names survive power loss.

        Args:
            folders: names; once one of them is removed, writing fails and does not recreate it.
        """

    @abstractmethod
    def inner(self, name: str) -> Directory:
        """Return the subdirectory of this name; a local one follows this directory when it is moved."""

    def present(self) -> Directory:
        """Return the directory that has this one's path now: this one, unless it was removed or replaced."""
        return self

    @abstractmethod
    def read(self, name: str, offset: int = 0) -> bytes:
        """Return the bytes of a file from ``offset`` to its end.

        Raises:
            CorruptStoreError: it is larger than ``READ_LIMIT``, or (local) large and mostly holes.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def names(self, below: str = "") -> list[str]:
        """Return the names of all files below a folder, at any depth, sorted; empty if the folder is absent."""

    @abstractmethod
    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all files that :meth:`names` lists, by name, from one scan.

        A file that is removed meanwhile is left out.
        """

    def sizes_of(self, names: Sequence[str], below: str) -> npt.NDArray[np.int64]:
        """Return the sizes in bytes of these files below a folder, -1 for absent ones."""
        sizes = self.sizes(below)  # one listing costs less than many requests
        return np.fromiter((sizes.get(name, -1) for name in names), np.int64, len(names))

    @abstractmethod
    def listing(self, below: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the files and of the folders directly in a folder, each sorted.

        Both are empty if the folder is absent.
        """

    def version(self, files: Sequence[str], after: str) -> Any:
        """Return a value that changes when one of these files changes, appears or vanishes; None if unknown.

        Takes one request in an object store, for the version of the last file: known if that follows ``after`` in the
        order of all names, so that none of the others exists between the two.
        """
        return None

    def listed(self, beginning: str, pages: int) -> Listed | None:
        """Return the versions of the files in the folders whose names begin so, as for :func:`version_in`.

        Only names of folders, log segments and ``metadata.json`` are sure to be included; shards and leases, which may
        be many, are not. Names are listed in their order, so that a file is not older than those before it.

        Returns:
            By folder, and by name in it. None if unknown, as in a local directory, or if it takes more than ``pages``
            requests.
        """
        return None

    @abstractmethod
    def map(self, name: str, size: int | None = None, *, sequential: bool = False) -> FileMap:
        """Return a file mapped into memory. Remote: fetched into the read cache first.

        Args:
            name: of the file.
            size: expected size in bytes, from the index; None if unknown.
            sequential: the file will be read from beginning to end, so readahead pays off.

        Raises:
            CorruptStoreError: it is absent, has another size, or is not a regular file.
        """

    @property
    def copies_files(self) -> bool:
        """Whether mapped files are local copies of remote ones."""
        return False

    def map_rows(self, name: str, size: int) -> FileMap:
        """Map a file of which only some rows will be read.

        The result may be a :class:`~trajstore._core.files.partial.PartialMap`, which is empty until
        :func:`~trajstore._core.files.partial.fetched` fetches ranges.

        Raises:
            CorruptStoreError: it is absent, has another size, or is not a regular file (partial: on reading).
        """
        return self.map(name, size)

    def drop_copies(self, names: Iterable[str]) -> bool:
        """Delete the local copies of these files, so that they are fetched anew; return False if there are none."""
        return False

    def check(self) -> None:  # noqa: B027  # most directories cannot be lost
        """Check that the directory still exists and that the writer's lock is still held.

        Raises:
            OSError: the directory or a folder of it was removed; names the path.
            StoreLockedError: the writer's lock is lost.
        """

    def confirm(self) -> None:
        """Do as :meth:`check`, and ask the object store for its lock.

        Raises:
            OSError: the request failed.
            StoreLockedError: the writer's lock is lost.
        """
        self.check()

    @abstractmethod
    def publish(self, files: Sequence[EncodedFile]) -> None:
        """Write files atomically each; all survive power loss on return.

        Raises:
            FileNotFoundError: the directory was not created, or was removed.
        """

    def bring(self, source: Directory, files: Sequence[tuple[str, str, int]]) -> None:
        """Take over finished files from another directory, durably: hard-linked where possible, else copied.

        Args:
            source: the other directory.
            files: (name in ``source``, name here, size in bytes) of each.
        """
        for old, new, size in files:
            self.publish([EncodedFile(new, [source.map(old, size, sequential=True).view])])

    @abstractmethod
    def append(self, name: str, data: Buffer) -> None:
        """Append to a log segment, durably. A failure leaves the segment as long as before."""

    def cut(self, name: str, end: int) -> None:
        """Truncate a log segment, durably; needs no disk space. Directories without append never have torn records.

        Args:
            name: of the segment.
            end: size to keep, in bytes.
        """
        raise NotImplementedError(f"{self.url}: segments are published whole")

    def clear_failed_appends(self) -> None:  # noqa: B027  # most have none
        """Truncate records left by failed appends that could not be undone at the time."""

    def settle(self, folder: str) -> None:  # noqa: B027  # servers keep removals durable
        """Make removals from a folder durable; their process may have been killed before it did so."""

    @abstractmethod
    def remove(self, names: Iterable[str], *, durable: bool = False) -> None:
        """Remove files; absent ones are no error.

        Args:
            names: of the files.
            durable: they stay removed after power loss. Needed where files removed later must not be outlived by
                these; otherwise a file that reappears is in no record and is removed again.
        """

    @abstractmethod
    def lock_writer(self, *, brief: bool = False) -> WriterLock:
        """Take the directory's writer lock.

        Args:
            brief: it is held for a moment only, so other writers wait for it.

        Raises:
            StoreLockedError: another writer holds it; names process, host and time.
        """

    def is_written(self) -> bool:
        """Return whether the directory has a live writer, without touching its lock.

        A killed writer may count as live until its process is known to be dead, or the next writer has closed.
        """
        return False

    def writer(self) -> Mapping[str, Any]:
        """Return ``pid``, ``host`` and ``since`` of the process that the lock names; empty if it was released."""
        return {}

    def announce_reader(self, generation: int = 0) -> ReaderLease:
        """Take a reader lease, so that evicted files stay.

        Args:
            generation: the oldest generation that will be read; 0 if unknown.
        """
        return ReaderLease()

    def readers(self, *, tidy: bool = False) -> list[Reader]:
        """Return the known readers.

        Args:
            tidy: remove the leases of dead readers (for the writer).
        """
        return []
