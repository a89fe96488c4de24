"""Local copies of remote files, for mapping; bounded, with LRU eviction."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from trajstore._core.base import locks
from trajstore._core.files.filemap import FileMap
from trajstore.errors import ConfigurationError

_PARTIAL = ".part"
_ABANDONED_AFTER = 24 * 3600.0


class ReadCache:
    """A folder of copies. Several processes may share it; a removed copy stays readable while it is mapped.

    Args:
        folder: for copies, which stay for later processes. None: a temporary folder of this process,
            removed when the cache is garbage-collected or the process ends.
        limit: bytes of all copies together. An evicted copy uses disk space until its last map is gone.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._temporary: dict[int, Path] = {}
        """The temporary folder of each process: this one, and the parent in a forked child."""
        self._mutex = locks.lock("ReadCache._mutex")
        self._downloads: weakref.WeakValueDictionary[str, _Download] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[object, ...]:
        return ReadCache, (self._folder, self._limit)

    def map(self, key: str, size: int, download: Callable[[Path], None], sequential: bool = False) -> FileMap:
        """Return a copy, mapped; ``download`` makes it if absent.

        Args:
            key: identifies the content; the same key always means the same bytes.
            size: of the content, in bytes.
            download: writes the content to the given path, and checks its size.
            sequential: it will be read from beginning to end.

        Raises:
            OSError: the download failed, or the disk is full.
        """
        name = hashlib.sha256(key.encode()).hexdigest()
        folder = self.open_folder()
        with self._mutex:
            pending = self._downloads.setdefault(name, _Download())
        path = folder / name
        with pending.lock:
            mapped = _map_copy(path, size, sequential)
            if mapped is None:
                mapped = self._fetch(path, size, download, sequential)
                self._evict(folder)
        return mapped

    def _fetch(self, path: Path, size: int, download: Callable[[Path], None], sequential: bool) -> FileMap:
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
        try:
            with usable(path.parent):
                partial.touch()
            download(partial)
            mapped = _map_copy(partial, size, sequential)  # other processes do not remove it under this name
            if mapped is None:
                raise OSError(errno.EIO, f"the copy does not have the {size:,} requested bytes", str(partial))
            os.rename(partial, path)
            return mapped
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)

    def _evict(self, folder: Path) -> None:
        """Remove the least recently used copies beyond the limit."""
        now = time.time()
        copies = []
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not entry.name.endswith(_PARTIAL):
                    copies.append((status.st_mtime, status.st_size, entry.path))
                elif now - status.st_mtime > _ABANDONED_AFTER:
                    os.unlink(entry.path)
        total = sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if total <= self._limit:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size

    @property
    def is_kept(self) -> bool:
        """Whether copies stay for later processes."""
        return self._folder is not None

    def drop(self, key: str) -> None:
        """Remove a copy, if present."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.open_folder() / hashlib.sha256(key.encode()).hexdigest())

    def open_folder(self) -> Path:
        """Return the folder, created if absent.

        Raises:
            ConfigurationError: it cannot be created.
        """
        if self._folder is not None:
            with usable(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            return self._folder
        owner = os.getpid()
        if owner not in self._temporary:  # no lock: a forked child could find it held for ever
            made = Path(tempfile.mkdtemp(prefix="trajstore-cache-"))
            weakref.finalize(self, _remove_folder, made, owner)
            self._temporary.setdefault(owner, made)
        return self._temporary[owner]


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Report errors in the block as a cache folder that cannot be written.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cache_dir {folder}: fetched files cannot be stored there ({error.strerror}); choose another one"
        ) from error


class _Download:
    """Locked while a copy is made, so that a second thread waits for it."""

    def __init__(self) -> None:
        self.lock = locks.lock("_Download.lock")


def _map_copy(path: Path, size: int, sequential: bool) -> FileMap | None:
    """Map a copy and mark it as used now; return None if it is absent or incomplete."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(PermissionError):  # another user's cache
            os.utime(descriptor)
        return FileMap(descriptor, size, sequential=sequential) if os.fstat(descriptor).st_size == size else None
    finally:
        os.close(descriptor)


def _remove_folder(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's copies
        shutil.rmtree(path, ignore_errors=True)
