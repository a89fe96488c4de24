"""A durable directory on a local POSIX file system."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import orjson

from trajstore.errors import StoreLockedError
from trajstore.formats.base import Buffer, EncodedFile
from trajstore.storage import Directory, Reader, ReaderLease, WriterLock, check_name

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"
LOCK_NAME = "writer.lock"
READERS_FOLDER = "readers"

_DIGITS = 20
"""Of the generation in a reader's lease."""

_IOV_MAX = 512
_MERGE_BELOW = 4096


class LocalDirectory(Directory):
    """Files are written under a temporary name, fsynced, renamed; then their folders are fsynced."""

    can_append: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._uncut: dict[str, int] = {}  # segments with half a record at their end that could not be cut off

    @property
    def url(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.is_dir()

    def create(self) -> None:
        _make_folder(self.path)

    def local_path(self, name: str) -> Path:
        return self.path / check_name(name)

    def read(self, name: str, offset: int = 0) -> bytes:
        with open(self.local_path(name), "rb") as file:
            if offset:
                file.seek(offset)
            return file.read()

    def size(self, name: str) -> int:
        return self.local_path(name).stat().st_size

    def names(self, below: str = "") -> list[str]:
        return sorted(name for name, _ in self._files(below))

    def sizes(self, below: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for name, entry in self._files(below):
            with contextlib.suppress(FileNotFoundError):
                found[name] = entry.stat().st_size
        return dict(sorted(found.items()))

    def listing(self) -> tuple[list[str], list[str]]:
        files: list[str] = []
        folders: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.name)
        return sorted(files), sorted(folders)

    def _files(self, below: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every file below a folder with what the system says of it."""
        folders = [below + "/" if below else ""]
        while folders:
            folder = folders.pop()
            try:
                entries = os.scandir(self.path / folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{folder}{entry.name}/")
                    else:
                        yield folder + entry.name, entry

    def publish(self, files: Sequence[EncodedFile]) -> None:
        folders: dict[Path, None] = {}
        written: list[tuple[Path, Path]] = []
        try:
            for file in files:
                target = self.local_path(file.name)
                if target.parent not in folders:
                    _make_folder(target.parent)
                    folders[target.parent] = None
                temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
                written.append((temporary, target))
                _write_file(temporary, file.pieces)
            for temporary, target in written:
                os.rename(temporary, target)
        except OSError:
            for temporary, _ in written:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            raise
        for folder in folders:
            sync_folder(folder)

    def append(self, name: str, data: Buffer) -> None:
        path = self.local_path(name)
        fresh = not path.exists()
        if fresh:
            _make_folder(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if fresh:
                _sync_new(path)
            end = self._uncut.get(name)
            if end is None:
                end = os.lseek(descriptor, 0, os.SEEK_END)
            else:
                self._cut(descriptor, name, end)
            try:
                _write_all(descriptor, [memoryview(data)], path)
                os.fdatasync(descriptor)
            except OSError as error:
                # Nothing may follow a half-written record: cut it off before anybody appends again.
                with contextlib.suppress(OSError):  # if this fails too, the next append begins with it
                    self._cut(descriptor, name, end)
                raise _named(error, path) from error
        finally:
            os.close(descriptor)

    def settle(self) -> None:
        for name, end in list(self._uncut.items()):
            descriptor = os.open(self.local_path(name), os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._cut(descriptor, name, end)
            finally:
                os.close(descriptor)

    def _cut(self, descriptor: int, name: str, end: int) -> None:
        self._uncut[name] = end
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        os.fsync(descriptor)
        del self._uncut[name]

    def truncate(self, name: str, size: int) -> None:
        """Cut a log segment to its first ``size`` bytes, durably (drops a torn last record)."""
        descriptor = os.open(self.local_path(name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, names: Iterable[str]) -> None:
        folders: set[Path] = set()
        for name in names:
            path = self.local_path(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            folders.add(path.parent)
        for folder in sorted(folders, reverse=True):  # a zarr group's folder after those of its arrays
            with contextlib.suppress(OSError):
                if folder != self.path and folder.parent != self.path:
                    folder.rmdir()  # the folder of one multi-file shard; fails while it has files

    def lock_writer(self) -> WriterLock:
        self.create()
        return LocalWriterLock(self.path / LOCK_NAME)

    def announce_reader(self) -> ReaderLease:
        if not (self.path / LOCK_NAME).exists():
            return ReaderLease()  # nobody has ever written here in place (a checkpoint, a foreign directory)
        try:
            return LocalReaderLease(self.path / READERS_FOLDER)
        except OSError as error:  # a read-only file system: nobody evicts there either
            logger.debug("%s: reading without an announcement: %s", self.path, error)
            return ReaderLease()

    def readers(self, *, tidy: bool = False) -> list[Reader]:
        found = (_read_lease(self.path / name, tidy) for name in self.names(READERS_FOLDER))
        return [reader for reader in found if reader is not None]


class LocalWriterLock(WriterLock):
    """An flock; the kernel gives it back when the holder dies. Its file says who holds it."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 4096, 0)
            os.close(self._descriptor)
            self._descriptor = None
            raise StoreLockedError(
                f"{path.parent} is being written by {describe_holder(holder)}; "
                "close that writer, or open the directory for reading"
            ) from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, orjson.dumps(holder_document()), 0)
        except OSError as error:
            self.release()
            raise _named(error, path) from error

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # its text only; what counts is the flock
                os.ftruncate(self._descriptor, 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may still have it open
            os.close(self._descriptor)
            self._descriptor = None


class LocalReaderLease(ReaderLease):
    """A file that says what is being read, under an flock that ends with the reader.

    Its text: 20 digits, the generation that is shown; a space, or ``+`` while a newer one is looked for; JSON that says
    who. An empty file is one that is looking for its first generation.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._pid = os.getpid()
        self._descriptor: int | None = None
        while self._descriptor is None:
            self._path = folder / f"{uuid.uuid4()}.pin"
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self._path.exists():
                self._descriptor = descriptor
            else:  # the writer took it for a dead reader's before it was locked
                os.close(descriptor)
        self._write(b"%020d+%b" % (0, orjson.dumps(holder_document())), 0)

    def look(self) -> None:
        self._write(b"+", _DIGITS)

    def settle(self, generation: int) -> None:
        self._write(b"%020d " % generation, 0)

    def _write(self, text: bytes, offset: int) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # no room for a new file's text: an empty one holds everything
                os.pwrite(self._descriptor, text, offset)

    def release(self) -> None:
        if self._descriptor is not None:
            if os.getpid() == self._pid:  # a forked child shares the lock; the file is the parent's
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = None


def _read_lease(path: Path, tidy: bool) -> Reader | None:
    """Return the live reader that a lease is of; that of a dead one is removed if it is to be tidied."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 4096, 0)
        known = len(text) >= _DIGITS and text[:_DIGITS].isdigit()
        return Reader(
            name=path.name,
            generation=int(text[:_DIGITS]) if known else 0,
            settled=known and text[_DIGITS : _DIGITS + 1] != b"+",
            holder=describe_holder(text[_DIGITS + 1 :]),
        )
    else:
        if tidy:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return None
    finally:
        os.close(descriptor)


def holder_document() -> dict[str, object]:
    """Return what a lock says about its holder: process id, host and the Unix time of taking it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}


def describe_holder(holder: bytes) -> str:
    """Return what a lock's text says about its holder, for people."""
    try:
        value = orjson.loads(holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value["since"]))
        return f"process {value['pid']} on {value['host']} since {since}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "another process"


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        os.close(descriptor)


def _sync_new(path: Path) -> None:
    """Make the name of a new, empty file survive power loss, or take the file away again."""
    try:
        sync_folder(path.parent)
    except OSError:
        os.unlink(path)
        raise


def _make_folder(path: Path) -> None:
    """Make a folder and its missing parents; every new name is synced."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        sync_folder(folder.parent)


def _write_file(path: Path, pieces: Iterable[Buffer]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write_all(descriptor, pieces, path)
        os.fsync(descriptor)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, pieces: Iterable[Buffer], path: Path) -> None:
    """Write pieces in order, in as few calls as possible."""
    for batch in _batches(pieces):
        remaining = [piece for piece in batch if piece.nbytes]
        while remaining:
            written = os.writev(descriptor, remaining)
            if written == 0:
                raise OSError(5, "no bytes could be written", str(path))
            while remaining and written >= remaining[0].nbytes:
                written -= remaining.pop(0).nbytes
            if written:
                remaining[0] = remaining[0][written:]


def _batches(pieces: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Group pieces for ``writev``; runs of small ones are merged, which is cheaper than passing them."""
    batch: list[memoryview] = []
    small: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece).cast("B") if memoryview(piece).nbytes else memoryview(b"")
        if view.nbytes < _MERGE_BELOW:
            small.append(view)
            continue
        if small:
            batch.append(memoryview(b"".join(small)))
            small = []
        batch.append(view)
        if len(batch) >= _IOV_MAX:
            yield batch
            batch = []
    if small:
        batch.append(memoryview(b"".join(small)))
    if batch:
        yield batch


def _named(error: OSError, path: Path) -> OSError:
    """Return the error with the file's name in it; descriptors have none."""
    if error.filename is None:
        return OSError(error.errno, error.strerror or str(error), str(path))
    return error
