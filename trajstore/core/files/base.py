"""Where the files of a store live: what every directory, local or remote, can do.

Names are relative and ``/``-separated. ``local`` has the durable local directory, ``remote`` the one over fsspec;
``opening`` chooses.
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from trajstore.core.files.filemap import FileMap
from trajstore.errors import UnsafeContentError

READ_LIMIT = 16 << 30
"""Bytes of the largest file that :meth:`Directory.read` reads: index and log of some hundred million trajectories."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that say that there is no space, or none for a file of this size (``ulimit -f``)."""

SEE_VERIFY = "; `trajstore verify` says what else is"
"""How the error ends that tells readers of a file that is missing."""

_SAFE_NAME = re.compile(r"[^\x00-\x1f\x7f\\]+")


def check_name(name: str, *, one_part: bool = False) -> str:
    """Return ``name`` if it stays below its directory; with ``one_part``, if it is a file right in it.

    Raises:
        UnsafeContentError: the name is absolute, has ``..`` or empty parts, or control characters.
    """
    parts = name.split("/")
    if one_part and len(parts) > 1:
        raise UnsafeContentError(f"file name {name!r} leaves the directory; the index was not written by trajstore")
    if not _SAFE_NAME.fullmatch(name) or any(part in ("", ".", "..") for part in parts) or re.match(r"[A-Za-z]:", name):
        raise UnsafeContentError(f"file name {name!r} leaves the directory; the index was not written by trajstore")
    return name


def is_safe_name(name: str) -> bool:
    """Return whether :func:`check_name` takes a name."""
    try:
        check_name(name)
    except UnsafeContentError:
        return False
    return True


Buffer = bytes | bytearray | memoryview
"""Anything contiguous that can be written."""


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """A file to be written: its name and its content in order. Pieces may alias memory of the caller's."""

    name: str
    pieces: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(memoryview(piece).nbytes for piece in self.pieces)


class WriterLock(ABC):
    """Held by the one writer of a directory; released by ``release()`` or the holder's death."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class ReaderLease:
    """Tells the writer what somebody reads; this one tells nothing (the directory keeps no list of readers).

    A new lease is looking: it holds what is needed at the generation that it was announced with and everything newer,
    until :meth:`settle`.
    """

    def look(self) -> None:
        """Say that a newer generation is about to be read: from now on everything newer stays, too."""

    def settle(self, generation: int) -> None:
        """Say that this generation is shown, and that no other is needed."""

    def release(self) -> None:
        """Say that nothing is needed any more. Calling it again does nothing."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader as the writer sees it.

    Attributes:
        name: of its lease.
        generation: what it shows.
        settled: whether it shows that generation alone; otherwise it is about to show a newer one.
        holder: process, host and since when, for people.
        process: process and host, the same for all its leases.
    """

    name: str
    generation: int
    settled: bool
    holder: str
    process: str


class Directory(ABC):
    """A directory of files that are published whole and never changed, and of append-only log segments.

    All methods are safe to call from several threads. I/O failures are ``OSError`` whose message names the file;
    ``FileNotFoundError`` when it is absent. What stands in place of a file and is none (a folder, a pipe, a socket, a
    device, symbolic links in a circle) is ``CorruptStoreError``; symbolic links to files are followed.
    """

    can_append: ClassVar[bool]
    """Whether ``append`` works; otherwise each commit publishes a log segment of its own."""

    @property
    def reads_ranges(self) -> bool:
        """Whether :meth:`map_rows` fetches less than whole files."""
        return False

    @property
    @abstractmethod
    def url(self) -> str:
        """Path or URL, as it is shown to people."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the directory itself exists (remote: whether any file is below it)."""

    @abstractmethod
    def create(self, folders: Sequence[str] = ()) -> None:
        """Make the directory, its parents, and folders right in it, if absent; their names survive power loss.

        Args:
            folders: these must stay from now on: when one is removed, writing fails and does not make it anew.
        """

    @abstractmethod
    def inner(self, name: str) -> Directory:
        """Return the directory in this one that has a name; local ones are found where this one is now."""

    @abstractmethod
    def read(self, name: str, offset: int = 0) -> bytes:
        """Return the bytes of a file from ``offset`` to its end.

        Raises:
            CorruptStoreError: it is larger than ``READ_LIMIT``, or (local) large and mostly never written.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def names(self, below: str = "") -> list[str]:
        """Return the names of all files below a folder, at any depth, sorted; empty if the folder is absent."""

    @abstractmethod
    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all files that :meth:`names` lists, by name, in one pass over the folder.

        A file that is removed meanwhile is left out.
        """

    def sizes_of(self, names: Sequence[str], below: str) -> npt.NDArray[np.int64]:
        """Return the size in bytes of each of some files below a folder, -1 of those that are not there."""
        found = self.sizes(below)  # of objects one listing costs less than many questions
        return np.fromiter((found.get(name, -1) for name in names), np.int64, len(names))

    @abstractmethod
    def listing(self, below: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the files and of the folders right in a folder, each sorted; no folder is entered.

        Both are empty if the folder is absent.
        """

    @abstractmethod
    def map(self, name: str, size: int | None = None, *, sequential: bool = False) -> FileMap:
        """Return a file mapped into memory. Remote: fetched into the read cache first.

        Args:
            name: of the file.
            size: what the index says, in bytes; None if it does not.
            sequential: it will be read from beginning to end, so reading ahead pays.

        Raises:
            CorruptStoreError: it is absent, has another size, or is no file.
        """

    @property
    def copies_files(self) -> bool:
        """Whether files that are mapped are local copies of what lies elsewhere."""
        return False

    def map_rows(self, name: str, size: int) -> FileMap:
        """Return a file mapped, of which some rows will be read.

        It may be a :class:`~trajstore.core.files.partial.PartialMap`, of which nothing is there until
        :func:`~trajstore.core.files.partial.fetched` asks for it.

        Raises:
            CorruptStoreError: it is absent, has another size, or is no file (of a partial one, once it is read).
        """
        return self.map(name, size)

    def drop_copies(self, names: Iterable[str]) -> bool:
        """Throw away local copies of files that were mapped, so that they are fetched anew; False: there are none."""
        return False

    def check(self) -> None:  # noqa: B027  # most cannot be taken away
        """Return if what this writer writes to is still there and still its own.

        Raises:
            OSError: the directory or a folder of it was removed; says where it was.
            StoreLockedError: the writer's lock is lost.
        """

    def confirm(self) -> None:
        """As :meth:`check`, but asking whoever knows: an object store for its lock.

        Raises:
            OSError: it cannot be asked.
            StoreLockedError: the writer's lock is lost.
        """
        self.check()

    @abstractmethod
    def publish(self, files: Sequence[EncodedFile]) -> None:
        """Write files so that each appears whole or not at all, and all survive power loss on return.

        Raises:
            FileNotFoundError: the directory was not created, or was removed.
        """

    def bring(self, source: Directory, files: Sequence[tuple[str, str, int]]) -> None:
        """Bring finished files over from another directory, durably: as links where the system can, else as copies.

        Args:
            source: has the files.
            files: (name there, name here, size in bytes) of each.
        """
        for old, new, size in files:
            self.publish([EncodedFile(new, [source.map(old, size, sequential=True).view])])

    @abstractmethod
    def append(self, name: str, data: Buffer) -> None:
        """Append to a log segment, durably. After a failure the segment ends where it ended before."""

    def cut(self, name: str, end: int) -> None:
        """Cut a log segment off, durably; this takes no space. Where nothing is appended, no record is ever torn.

        Args:
            name: of the segment.
            end: bytes that stay.
        """
        raise NotImplementedError(f"{self.url}: segments are published whole")

    def clear_failed_appends(self) -> None:  # noqa: B027  # most have none
        """Cut off what failed appends left behind, where they could not do so themselves."""

    def settle(self, folder: str) -> None:  # noqa: B027  # nothing to do where a server keeps the names
        """Let what was removed from a folder stay removed: who did it may have been killed before it was durable."""

    @abstractmethod
    def remove(self, names: Iterable[str], *, durable: bool = False) -> None:
        """Remove files; absent ones are no error.

        Args:
            names: of the files.
            durable: they stay removed after power loss. Needed where something else that is removed later must not be
                outlived by them; what comes back otherwise is named by no record and is removed again.
        """

    @abstractmethod
    def lock_writer(self) -> WriterLock:
        """Become the directory's one writer.

        Raises:
            StoreLockedError: somebody else is; names process, host and time.
        """

    def is_written(self) -> bool:
        """Return whether somebody writes here, as far as the writer's lock tells without being touched.

        A writer that was killed may count as one until its process is known to be gone, or the next one has ended.
        """
        return False

    def announce_reader(self, generation: int = 0) -> ReaderLease:
        """Tell the writer that somebody reads, so that evicted files stay.

        Args:
            generation: nothing older will be read; 0 where nobody can tell.
        """
        return ReaderLease()

    def readers(self, *, tidy: bool = False) -> list[Reader]:
        """Return who reads, as far as that is known.

        Args:
            tidy: remove what dead readers left (for the writer).
        """
        return []
