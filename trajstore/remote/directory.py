"""A directory in an object store, over fsspec: ``s3://``, ``gs://``, ``memory://``, ...

Object stores write an object atomically, and durably before they respond; nothing is renamed or
appended. File systems without that guarantee (``sftp://``, ``smb://``) are read-only here.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from trajstore._core.base.arguments import finite, truth, whole
from trajstore._core.files.base import (
    Buffer,
    Directory,
    EncodedFile,
    LateLease,
    Listed,
    Reader,
    ReaderLease,
    WriterLock,
    check_name,
    version_in,
)
from trajstore._core.files.filemap import FileMap
from trajstore._core.files.holder import LOCK_NAME
from trajstore._core.files.parallel import at_once
from trajstore._core.files.partial import PartialMaps, Range
from trajstore._core.files.read_cache import ReadCache
from trajstore._core.store.sealed import INDEX_NAME
from trajstore.errors import CorruptStoreError
from trajstore.remote.answers import ConflictError
from trajstore.remote.leases import RemoteReaderLease, RemoteReaders
from trajstore.remote.lock import RemoteWriterLock, holder_of, is_held
from trajstore.remote.object_store import ObjectStore

logger = logging.getLogger(__name__)

_ATTEMPTS = 10  # to change an object that others change too

_LOG, _SHARDS = "log/", "shards/"
"""Folders of write-once files. Shards of two stores mirrored to one place can have the same name."""

_NOT_IN_LOG = "r"
"""A letter in the names of shards, readers' leases and the index, but not in those of log segments and metadata.json.

With it as delimiter a listing has one entry for all shards of a store.
"""


class RemoteDirectory(Directory):
    """Each file is one object, written with one PUT; each commit is one log segment object.

    Files to be mapped are copied to a local read cache first, whole ones with one request. Copies in a ``cache_dir``
    need a request for size and version at their next use; those of one process are compared with checksums.

    A writer that lost its lock while frozen cannot overwrite the next writer's files: log segments are created only if
    absent, shard numbers belong to one writer, and other objects are replaced or removed only at the version that this
    writer last saw while it held the lock. See docs/design/many-machines.md.

    Args:
        url: fsspec URL of the directory.
        cache_dir: folder of local copies, kept for later runs. None: a temporary one.
        cache_bytes: bytes of local copies; least recently used copies are evicted first.
        range_reads: batches fetch the drawn rows, not their whole shards. Fetched rows are kept separately from whole
            files, up to ``cache_bytes``.
        lock_ttl: seconds without a heartbeat after which others may take the writer's lock.
        lease_ttl: seconds without a heartbeat after which a writer takes a reader for dead. A reader renews its
            lease every third of it.
        options: storage options of the fsspec file system (credentials, endpoint, ...).

    Raises:
        MissingDependencyError: the file system's package is not installed.
        ConfigurationError: an argument is out of range, or the file system does not accept it.
    """

    can_append: ClassVar[bool] = False

    def __init__(
        self,
        url: str,
        *,
        cache_dir: str | Path | None = None,
        cache_bytes: int = 4 << 30,
        range_reads: bool = False,
        lock_ttl: float = 60.0,
        lease_ttl: float = 600.0,
        **options: Any,
    ) -> None:
        self._objects = ObjectStore(url, options)
        self._cache_bytes = whole("cache_bytes", cache_bytes, 0)
        self._cache = ReadCache(None if cache_dir is None else Path(cache_dir).absolute(), self._cache_bytes)
        self._range_reads = truth("range_reads", range_reads)
        self._partial = self._make_partial()
        self._lock_ttl = finite("lock_ttl", lock_ttl, 0, above=True)
        self._lease_ttl = finite("lease_ttl", lease_ttl, 0, above=True)
        self._lock: RemoteWriterLock | None = None
        self._versions: dict[str, str | None] = {}  # of objects that this writer replaces, seen while it held the lock
        self._readers = RemoteReaders(self._objects)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_versions": {}, "_partial": None}  # another process is another writer

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._partial = self._make_partial()

    def _make_partial(self) -> PartialMaps | None:
        if not self._range_reads:
            return None
        return PartialMaps(self._fetch, self._cache.open_folder, self._cache_bytes)

    def _fetch(self, ranges: Sequence[Range]) -> Generator[tuple[int, Buffer], None, None]:
        """Yield the index and bytes of each range.

        Raises:
            CorruptStoreError: a file is absent.
            OSError: a fetch failed; names the file.
        """
        try:
            yield from self._objects.ranges([(piece.name, piece.start, piece.stop) for piece in ranges])
        except FileNotFoundError as error:
            raise self._gone(error.filename) from error

    @property
    def url(self) -> str:
        return self._objects.url

    def exists(self) -> bool:
        return self._objects.any()

    def create(self, folders: Sequence[str] = ()) -> None:
        """Do nothing: object stores have no folders, and buckets are created elsewhere."""

    def inner(self, name: str) -> Directory:
        inner = copy(self)
        inner._objects = self._objects.inner(check_name(name))
        inner._lock, inner._versions = None, {}
        inner._readers = RemoteReaders(inner._objects)
        inner._partial = inner._make_partial()
        return inner

    def read(self, name: str, offset: int = 0) -> bytes:
        return self._objects.read(check_name(name), offset, in_parts=name == INDEX_NAME)

    def size(self, name: str) -> int:
        return self._objects.info(check_name(name)).size

    def names(self, below: str = "") -> list[str]:
        return list(self.sizes(below))

    def sizes(self, below: str = "") -> dict[str, int]:
        return self._objects.sizes(check_name(below) if below else "")

    def listing(self, below: str = "") -> tuple[list[str], list[str]]:
        return self._objects.listing(check_name(below) if below else "")

    def version(self, files: Sequence[str], after: str) -> Any:
        return version_in(self._objects.following(check_name(after)), files, after)

    def listed(self, beginning: str, pages: int) -> Listed | None:
        versions = self._objects.versions(beginning, _NOT_IN_LOG, pages)
        if versions is None:
            return None
        folders: dict[str, dict[str, str]] = {}
        for path, version in versions.items():
            folder, inside, name = path.partition("/")
            if inside:
                folders.setdefault(folder, {})[name] = version
        return folders

    def map(self, name: str, size: int | None = None, *, sequential: bool = False) -> FileMap:
        url = self._objects.url_of(check_name(name))
        try:
            if size is None or self._cache.is_kept:
                key, there = self._key(name)
            else:
                key, there = url, size
            if there != (there if size is None else size):
                raise self._cut(url, there, size)
            try:
                return self._cache.map(key, there, partial(self._objects.download, name, there), sequential)
            except OSError as error:
                if error.errno == errno.EIO and (now := self._objects.info(name).size) != there:
                    raise self._cut(url, now, there) from error
                raise
        except FileNotFoundError as error:
            raise self._gone(url) from error

    def _key(self, name: str) -> tuple[str, int]:
        """Return the key of the object's copy, with its version, and its size; for copies that outlive a process."""
        info = self._objects.info(name)
        return f"{self._objects.url_of(name)}\n{info.size}\n{info.version}", info.size

    @staticmethod
    def _cut(url: str, nbytes: int, size: int | None) -> CorruptStoreError:
        return CorruptStoreError(f"{url}: has {nbytes:,} bytes, the index says {size:,}; restore it from a copy")

    @property
    def copies_files(self) -> bool:
        return True

    def drop_copies(self, names: Iterable[str]) -> bool:
        for name in names:
            self._cache.drop(self._key(check_name(name))[0] if self._cache.is_kept else self._objects.url_of(name))
        return True

    def _gone(self, url: str) -> CorruptStoreError:
        return CorruptStoreError(
            f"{url}: is missing, but the index names it; a writer that evicts may have deleted "
            f"it since (a reader that is cut off for {self._lease_ttl:g} s counts as gone): refresh(), or load it again"
        )

    @property
    def reads_ranges(self) -> bool:
        return self._partial is not None

    def map_rows(self, name: str, size: int) -> FileMap:
        return self.map(name, size) if self._partial is None else self._partial.map(check_name(name), size)

    def check(self) -> None:
        self._check_lock()

    def confirm(self) -> None:
        if self._lock is not None:
            self._lock.confirm()

    def publish(self, files: Sequence[EncodedFile]) -> None:
        for file in files:
            check_name(file.name)
        self._check_lock()
        at_once(self._publish, files)

    def _publish(self, file: EncodedFile) -> None:
        data = b"".join(map(_flat, file.pieces))
        if self._is_plain(file.name):
            self._objects.put(file.name, data)
        elif not file.name.startswith(_SHARDS) or not self._objects.create(file.name, data):
            self._change(file.name, lambda version: self._objects.put_if(file.name, data, version))

    def _is_plain(self, name: str) -> bool:
        """Return whether a file is changed without conditions: no lock, write-once, or a server without conditions."""
        return self._lock is None or name.startswith(_LOG) or not self._objects.keeps_match

    def _change(self, name: str, request: Callable[[str | None], str | None]) -> None:
        """Change a file on condition of its version, which is None if it is absent.

        A cached version is from a time when this writer held the lock, so any later change by the next writer makes the
        condition fail. A late write that another writer sent before losing the lock is overwritten.

        Raises:
            WriterFencedError: another writer has the lock.
        """
        for _ in range(_ATTEMPTS):
            if name not in self._versions:
                version = self._objects.version(name)
                if self._lock is not None:
                    self._lock.confirm()
                self._versions[name] = version
            try:
                self._versions[name] = request(self._versions[name])
                return
            except ConflictError:
                self._versions.pop(name, None)
            except OSError:
                self._versions.pop(name, None)  # unknown whether it was carried out
                raise
        raise OSError(errno.EBUSY, "another process keeps changing it", self._objects.url_of(name))

    def append(self, name: str, data: Buffer) -> None:
        """Publish a log segment. It is written once: there is no second append to it.

        Raises:
            FileExistsError: the segment exists; another writer has committed this generation.
            WriterFencedError: another writer has the lock.
        """
        check_name(name)
        self._check_lock()
        content = bytes(data)
        # A retried request may find the object of its first attempt: that is success.
        if not self._objects.create(name, content) and self._content(name) != content:
            if self._lock is not None:
                self._lock.confirm()
            raise FileExistsError(
                errno.EEXIST, "another writer has written this log segment", self._objects.url_of(name)
            )
        if self._lock is not None and self._lock.is_late:
            self._lock.confirm()  # the next writer may have written and deleted this segment

    def _content(self, name: str) -> bytes | None:
        """Return an object's bytes; None if another writer has deleted it meanwhile."""
        try:
            return self._objects.read(name)
        except FileNotFoundError:
            return None

    def remove(self, names: Iterable[str], *, durable: bool = False) -> None:
        checked = [check_name(name) for name in names]
        self._check_lock()
        at_once(self._remove, checked)

    def _remove(self, name: str) -> None:
        if self._is_plain(name) or name.startswith(_SHARDS):
            self._objects.delete(name)
        else:
            self._change(name, lambda version: None if version is None else self._objects.delete_if(name, version))

    # -- locks and leases --------------------------------------------------------------------------

    def lock_writer(self, *, brief: bool = False) -> WriterLock:
        self._lock = RemoteWriterLock(self._objects, self._lock_ttl, brief=brief)
        self._versions = {}
        return self._lock

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def is_written(self) -> bool:
        return is_held(self._objects)

    def writer(self) -> Mapping[str, Any]:
        return holder_of(self._objects)

    def announce_reader(self, generation: int = 0) -> ReaderLease:
        files, folders = self.listing()
        if LOCK_NAME not in files and "log" not in folders:
            return LateLease(self.announce_reader, generation)
        try:
            return RemoteReaderLease(self._objects, generation, self._lease_ttl)
        except OSError as error:
            logger.warning(
                "%s: read without a lease, so its writer may delete shards that this reader shows: %s", self.url, error
            )
            return ReaderLease()

    def readers(self, *, tidy: bool = False) -> list[Reader]:
        return self._readers.find(tidy=tidy)


def _flat(piece: Buffer) -> memoryview:
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")
