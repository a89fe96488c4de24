"""A durable directory on a local POSIX file system."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.files.base import (
    READ_LIMIT,
    SEE_VERIFY,
    Buffer,
    Directory,
    EncodedFile,
    LateLease,
    Reader,
    ReaderLease,
    WriterLock,
    check_name,
)
from trajstore._core.files.descriptors import write_all
from trajstore._core.files.filemap import FileMap
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.holder import LOCK_NAME, may_live, parse_holder
from trajstore._core.files.leases import READERS_FOLDER
from trajstore._core.files.local_locks import LocalReaderLease, LocalWriterLock, read_lease
from trajstore.errors import CorruptStoreError

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"

_SPARSE_FROM = 64 << 20


class LocalDirectory(Directory):
    """Files are written under a temporary name, fsynced and renamed; then their folders are fsynced.

    The directory is held by a descriptor once it exists. After a move it is read and written at its new place; after
    removal, calls fail and do not recreate it or a folder in it that existed before.

    Args:
        path: of the directory; a relative one is resolved now.
        where: its absolute path, if known.
        root: the folder, if it is held already.
        staged: whether names are made durable together, by :meth:`sync_staged`, before the folder is published.
    """

    can_append: ClassVar[bool] = True

    def __init__(
        self, path: Path, where: str | None = None, *, root: HeldFolder | None = None, staged: bool = False
    ) -> None:
        self.path = path
        self.root = root or HeldFolder(path, where)
        self._mutex = locks.lock("LocalDirectory._mutex")
        self._known: set[str] = set()  # subfolders that existed
        self._durable: set[str] = set()  # those of them whose names are durable
        self._staged: dict[str, None] | None = {} if staged else None  # folders to sync
        self._segments: dict[str, int] = {}  # log segments appended to, with durable names: their ends
        self._uncut: dict[str, int] = {}  # segments that end in a partial record that could not be truncated
        self._lock: LocalWriterLock | None = None
        self._pid = os.getpid()
        self._is_announced = True

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalDirectory, (self.path, self.root.where)

    @property
    def url(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.root.is_there()

    def create(self, folders: Sequence[str] = ()) -> None:
        self.root.make()
        for folder in folders:
            self.root.make_folder(check_name(folder, one_part=True))
        self._sync([""])
        with self._mutex:
            self._known.update(folders)

    def inner(self, name: str) -> Directory:
        return LocalDirectory(self.path / name, root=self.root.inner(check_name(name)))

    def present(self) -> Directory:
        return self if self.root.fate() is None else LocalDirectory(self.path, self.root.where)

    # -- reading -----------------------------------------------------------------------------------

    def read(self, name: str, offset: int = 0) -> bytes:
        descriptor = self.root.open(check_name(name), os.O_RDONLY)
        with self.root.naming(name), open(descriptor, "rb", buffering=0) as file:
            self._check_plausible(descriptor, name)
            file.seek(offset)
            return file.readall()

    def _check_plausible(self, descriptor: int, name: str) -> None:
        """Refuse files that would fill the memory: trajstore's own are neither so large nor mostly holes."""
        size = os.fstat(descriptor).st_size
        if size > READ_LIMIT:
            raise CorruptStoreError(
                f"{self.url}/{name}: has {size:,} bytes; files of this kind have at most {READ_LIMIT:,}"
            )
        if size >= _SPARSE_FROM:
            with contextlib.suppress(OSError):  # not every file system reports holes
                if os.lseek(descriptor, 0, os.SEEK_HOLE) < size // 2:
                    raise CorruptStoreError(f"{self.url}/{name}: has {size:,} bytes, most of which were never written")

    def size(self, name: str) -> int:
        return self.root.stat(check_name(name)).st_size

    def version(self, files: Sequence[str], after: str) -> Any:
        return [self.root.version(name) for name in files]

    def names(self, below: str = "") -> list[str]:
        return sorted(name for name, _ in self._files(below))

    def sizes_of(self, names: Sequence[str], below: str) -> npt.NDArray[np.int64]:
        return self.root.sizes(names)

    def sizes(self, below: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for name, entry in self._files(below):
            try:  # cheaper than a context manager, for a million files
                found[name] = _size_of(entry)
            except FileNotFoundError:
                continue
        return found

    def listing(self, below: str = "") -> tuple[list[str], list[str]]:
        above = check_name(below) + "/" if below else ""
        files: list[str] = []
        folders: list[str] = []
        for entry in self._entries(above):
            (folders if _is_folder(entry) else files).append(above + entry.name)
        return sorted(files), sorted(folders)

    def _files(self, below: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every file below a folder with its directory entry."""
        folders = [check_name(below) + "/" if below else ""]
        while folders:
            folder = folders.pop()
            for entry in self._entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{folder}{entry.name}/")
                else:
                    yield folder + entry.name, entry

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Yield a folder's entries; none if the folder is absent."""
        try:
            descriptor = self.root.open_folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            with self.root.naming(folder), os.scandir(descriptor) as entries:
                yield from entries
        finally:
            os.close(descriptor)

    def map(self, name: str, size: int | None = None, *, sequential: bool = False) -> FileMap:
        try:
            with self.root.opened(check_name(name), os.O_RDONLY) as descriptor:
                file_size = os.fstat(descriptor).st_size
                if size is not None and file_size != size:
                    raise CorruptStoreError(
                        f"{self.url}/{name}: has {file_size:,} bytes, the index says {size:,}; restore it from a copy"
                    )
                return FileMap(descriptor, file_size, sequential=sequential)
        except FileNotFoundError as error:
            fate = self.root.fate()
            if fate is None and os.getpid() != self._pid:
                fate = "this process was forked, and its parent may have let go of it since"
            if fate is None and not self._is_announced and self._has_been_written():
                fate = "a writer, which does not know of this reader, has begun there since it was opened"
            reason = SEE_VERIFY if fate is None else f"; {fate}; load it again"
            raise CorruptStoreError(f"{self.url}/{name}: is missing, but the index names it{reason}") from error

    # -- writing -----------------------------------------------------------------------------------

    def check(self) -> None:
        self.root.check()
        with self._mutex:
            known = sorted(self._known)
        for folder in known:
            self._check_folder(folder)
        if self._lock is not None:
            self._lock.check()

    def _check_folder(self, folder: str) -> None:
        if not self.root.has_folder(folder):
            text = f"the folder was removed while the directory was open (it was {self.root.where}); put it back"
            raise FileNotFoundError(errno.ENOENT, text, f"{self.url}/{folder}")

    def publish(self, files: Sequence[EncodedFile]) -> None:
        names = [*map(check_name, map(attrgetter("name"), files))]
        folders = self._make_folders(names)
        written: list[str] = []
        try:
            for file in files:
                written.append(file.name + TEMPORARY_SUFFIX)
                with self.root.opened(written[-1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                    write_all(descriptor, file.pieces)
                    os.fsync(descriptor)
            for temporary, name in zip(written, names, strict=True):
                self.root.rename(temporary, name)
                self._segments.pop(name, None)
        except BaseException:
            for temporary in written:
                with contextlib.suppress(OSError):
                    self.root.unlink(temporary)
            raise
        self._sync(folders)

    def bring(self, source: Directory, files: Sequence[tuple[str, str, int]]) -> None:
        if not isinstance(source, LocalDirectory):
            super().bring(source, files)
            return
        folders = self._make_folders([check_name(new) for _, new, _ in files])
        copies = []
        for old, new, size in files:
            try:
                os.link(check_name(old), new, src_dir_fd=source.root.number, dst_dir_fd=self.root.number)
            except OSError:  # another file system, or one without links; copying reports an absent file
                copies.append((old, new, size))
        super().bring(source, copies)
        self._sync(folders)

    def _make_folders(self, names: Iterable[str]) -> list[str]:
        """Create the files' folders where absent; return all folders that must be synced then.

        Raises:
            FileNotFoundError: a folder in the directory existed before and was removed.
        """
        changed: dict[str, None] = {}
        for name in names:
            changed[name.rpartition("/")[0]] = None
        for folder in list(changed):
            absent = []
            above = folder
            while above:
                present = self.root.has_folder(above)
                if present and above in self._durable:
                    break
                if not present:
                    absent.append(above)
                # An existing folder too: its maker may have been killed before its name was durable.
                above = above.rpartition("/")[0]
                changed[above] = None
            for made in reversed(absent):
                if made in self._known:
                    self._check_folder(made)
                self.root.make_folder(made)
            if folder:
                with self._mutex:
                    self._known.add(folder.partition("/")[0])
        return list(changed)

    def _sync(self, folders: Iterable[str]) -> None:
        """Fsync the folders that :meth:`_make_folders` returned, and mark them durable; later, if staged."""
        if self._staged is not None:
            self._staged.update(dict.fromkeys(folders))
            return
        durable = set[str]()
        for folder in folders:
            self.root.sync(folder)
            if folder and "/" not in folder:
                durable.add(folder)
        with self._mutex:
            self._durable |= durable

    def sync_staged(self) -> None:
        """Make the names of all files durable that were written while the directory was staged."""
        folders, self._staged = self._staged or (), None
        self._sync(folder for folder in folders if not folder or self.root.has_folder(folder))

    # -- the log -----------------------------------------------------------------------------------

    def append(self, name: str, data: Buffer) -> None:
        check_name(name)
        self.check()
        known = self._segments.get(name)
        # The first append makes the segment's name durable: its maker may have been killed before.
        folders = self._make_folders([name]) if known is None else []
        with self.root.opened(name, os.O_WRONLY | (os.O_CREAT if known is None else 0)) as descriptor:
            self._sync(folders)
            end = self._uncut.get(name)
            if end is None:
                end = os.lseek(descriptor, 0, os.SEEK_END)
            else:
                self._cut(descriptor, name, end)
            if known not in (None, end):
                text = f"has {end:,} bytes, {known:,} after the last commit: another process has changed it"
                raise OSError(errno.ESTALE, text)
            try:
                write_all(descriptor, [memoryview(data)])
                os.fdatasync(descriptor)
            except OSError:
                # Nothing may follow a partial record: truncate it before the next append.
                with contextlib.suppress(OSError):  # if this fails too, the next append truncates first
                    self._cut(descriptor, name, end)
                raise
            self._segments[name] = end + memoryview(data).nbytes

    def cut(self, name: str, end: int) -> None:
        self._uncut[check_name(name)] = end
        self.clear_failed_appends()

    def clear_failed_appends(self) -> None:
        for name, end in list(self._uncut.items()):
            with self.root.opened(name, os.O_WRONLY) as descriptor:
                self._cut(descriptor, name, end)

    def _cut(self, descriptor: int, name: str, end: int) -> None:
        self._uncut[name] = end
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        os.fsync(descriptor)
        del self._uncut[name]

    # -- removing ----------------------------------------------------------------------------------

    def remove(self, names: Iterable[str], *, durable: bool = False) -> None:
        folders: set[str] = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.root.unlink(check_name(name))
            self._segments.pop(name, None)
            folders.add(name.rpartition("/")[0])
        for folder in sorted(folders, reverse=True):  # a zarr group's folder after those of its arrays
            if "/" in folder:
                with contextlib.suppress(OSError):
                    self.root.remove_folder(folder)  # the folder of a multi-file shard; fails while it has files
        if durable:
            for folder in sorted(folders):
                with contextlib.suppress(FileNotFoundError):  # absent, or removed just now
                    self.root.sync(folder)

    def settle(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.root.sync(check_name(folder))

    # -- locks and leases --------------------------------------------------------------------------

    def lock_writer(self, *, brief: bool = False) -> WriterLock:
        self.create()
        self._lock = LocalWriterLock(self.root, brief=brief)
        return self._lock

    def is_written(self) -> bool:
        try:
            return may_live(self.read(LOCK_NAME))  # not with flock, which would keep a writer out for a moment
        except (FileNotFoundError, CorruptStoreError):
            return False

    def writer(self) -> Mapping[str, Any]:
        try:
            return parse_holder(self.read(LOCK_NAME))
        except (FileNotFoundError, CorruptStoreError):
            return {}

    def announce_reader(self, generation: int = 0) -> ReaderLease:
        self._is_announced = self._has_been_written()
        if not self._is_announced:
            return LateLease(self.announce_reader, generation)
        try:
            return LocalReaderLease(self.root, generation)
        except OSError as error:  # a full disk, or a read-only one, where no writer evicts either
            logger.debug("%s: reading without an announcement: %s", self.path, error)
            self._is_announced = False
            return LateLease(self.announce_reader, generation)

    def _has_been_written(self) -> bool:
        """Return whether a writer has begun in place, or is to: not in a checkpoint, a copy, or a foreign directory."""
        with contextlib.suppress(FileNotFoundError, CorruptStoreError):
            self.root.stat(LOCK_NAME)
            return True
        with contextlib.suppress(OSError, CorruptStoreError):  # a restored store has both; others may have one of them
            for name in ("log", "shards"):
                os.close(self.root.open_folder(name))
            return True
        return False

    def readers(self, *, tidy: bool = False) -> list[Reader]:
        readers = (read_lease(self.root, name, tidy) for name in self.names(READERS_FOLDER))
        return [reader for reader in readers if reader is not None]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):  # links in a circle are not folders
        return entry.is_dir()
    return False


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return entry.stat(follow_symlinks=False).st_size  # of the link: its target is absent
