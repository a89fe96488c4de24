"""A directory in an object store, over fsspec: ``s3://``, ``gs://``, ``memory://``, ...

Object stores write an object whole or not at all, and durably before they answer; nothing is renamed or
appended. File systems without that promise (``sftp://``, ``smb://``) are not for writing.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson

from trajstore.errors import ConfigurationError, CorruptStoreError, StoreLockedError
from trajstore.files.base import Buffer, Directory, EncodedFile, WriterLock, check_name
from trajstore.files.filemap import FileMap
from trajstore.files.holder import LOCK_NAME, describe_holder, holder_document
from trajstore.files.object_store import ObjectStore
from trajstore.files.read_cache import ReadCache

logger = logging.getLogger(__name__)

_CONNECTIONS = 16  # requests of one call that are under way at once

Item = TypeVar("Item")


class RemoteDirectory(Directory):
    """Each file is one object, written with one PUT; a log segment is the object of one commit.

    Files to be mapped are copied to a local read cache first. They never change, so a copy that is there is used
    after asking the store for its size and version only.

    Args:
        url: fsspec URL of the directory.
        cache_dir: folder of local copies, kept for later runs. None: a temporary one.
        cache_bytes: bytes of local copies; the least recently used go first.
        lock_ttl: seconds without a sign of life after which others may take the writer's lock.
        options: storage options of the fsspec file system (credentials, endpoint, ...).

    Raises:
        MissingDependencyError: the file system's package is not installed.
        ConfigurationError: an argument is out of range, or the file system does not take it.
    """

    can_append: ClassVar[bool] = False

    def __init__(
        self,
        url: str,
        *,
        cache_dir: str | Path | None = None,
        cache_bytes: int = 4 << 30,
        lock_ttl: float = 60.0,
        **options: Any,
    ) -> None:
        if cache_bytes < 0:
            raise ConfigurationError(f"cache_bytes is {cache_bytes}, must be at least 0")
        if not lock_ttl > 0:
            raise ConfigurationError(f"lock_ttl is {lock_ttl}, must be more than 0 seconds")
        self._objects = ObjectStore(url, options)
        self._cache = ReadCache(None if cache_dir is None else Path(cache_dir).absolute(), cache_bytes)
        self._lock_ttl = lock_ttl
        self._lock: RemoteWriterLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}  # another process is another writer

    @property
    def url(self) -> str:
        return self._objects.url

    def exists(self) -> bool:
        return self._objects.any()

    def create(self, folders: Sequence[str] = ()) -> None:
        """Do nothing: an object store has no folders, and makes buckets on other terms than this."""

    def inner(self, name: str) -> Directory:
        inner = copy(self)
        inner._objects = self._objects.inner(check_name(name))
        inner._lock = None
        return inner

    def read(self, name: str, offset: int = 0) -> bytes:
        return self._objects.read(check_name(name), offset)

    def size(self, name: str) -> int:
        return self._objects.info(check_name(name)).size

    def names(self, below: str = "") -> list[str]:
        return list(self.sizes(below))

    def sizes(self, below: str = "", only: Sequence[str] | None = None) -> dict[str, int]:
        found = self._objects.sizes(check_name(below) if below else "")  # one listing costs less than many questions
        return found if only is None else {name: found[name] for name in only if name in found}

    def listing(self, below: str = "") -> tuple[list[str], list[str]]:
        return self._objects.listing(check_name(below) if below else "")

    def map(self, name: str, size: int | None = None, *, sequential: bool = False) -> FileMap:
        url = self._objects.url_of(check_name(name))
        try:
            info = self._objects.info(name)
            if size is not None and info.size != size:
                raise CorruptStoreError(
                    f"{url}: has {info.size:,} bytes, the index says {size:,}; restore it from a copy"
                )
            key = f"{url}\n{info.size}\n{info.version}"
            return self._cache.map(key, info.size, partial(self._objects.download, name, info.size), sequential)
        except FileNotFoundError as error:
            raise CorruptStoreError(
                f"{url}: is missing, but the index names it; a writer that evicts may have deleted it since "
                "(it does not know who reads an object store): refresh(), or load the directory again"
            ) from error

    def check(self) -> None:
        self._check_lock()

    def publish(self, files: Sequence[EncodedFile]) -> None:
        for file in files:
            check_name(file.name)
        self._check_lock()
        _for_each(lambda file: self._objects.put(file.name, b"".join(map(_flat, file.pieces))), files)

    def append(self, name: str, data: Buffer) -> None:
        """Publish a log segment. It is written once: there is no second append to it.

        Raises:
            FileExistsError: the segment exists; somebody else has committed this generation.
        """
        check_name(name)
        self._check_lock()
        content = bytes(data)
        # A retried request finds what its first attempt has written: that is success.
        if not self._objects.create(name, content) and self._objects.read(name) != content:
            raise FileExistsError(
                errno.EEXIST, "another writer has written this log segment", self._objects.url_of(name)
            )

    def remove(self, names: Iterable[str], *, durable: bool = False) -> None:
        checked = [check_name(name) for name in names]
        self._check_lock()
        _for_each(self._objects.delete, checked)

    def lock_writer(self) -> WriterLock:
        self._lock = RemoteWriterLock(self._objects, self._lock_ttl)
        return self._lock

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()


class RemoteWriterLock(WriterLock):
    """An object that says who writes, with a heartbeat every third of its time to live.

    Taking it is atomic where the store creates objects conditionally (S3, Google, Azure, MinIO); elsewhere two
    processes that start within one round trip can both believe they hold it, until the next heartbeat tells one of
    them. A lock is taken over when its heartbeat is older than its time to live (by the clocks of both machines, which
    must agree better than that), or when its holder was a process of this machine that is gone.

    A holder that is cut off for longer than that must not write, for others may: :meth:`check` raises until it finds
    its lock untouched, and for good if somebody else has taken it.

    Raises:
        StoreLockedError: somebody else holds it; names process, host and time.
    """

    def __init__(self, objects: ObjectStore, ttl: float) -> None:
        self._objects = objects
        self._ttl = ttl
        self._pid = os.getpid()
        self._document = {
            **holder_document(),
            "pid_namespace": _pid_namespace(),
            "token": uuid.uuid4().hex,
            "ttl": ttl,
        }
        self._taken_by: bytes | None = None
        self._released = threading.Event()
        self._renewed = time.monotonic()
        self._take()
        self._thread = threading.Thread(target=self._keep, name="trajstore-writer-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Return if the lock is held still, or was released.

        Raises:
            StoreLockedError: it was lost.
        """
        if self._released.is_set():
            return
        if self._taken_by is not None:
            raise self._refusal(self._taken_by, "was taken over: it is being written")
        if time.monotonic() - self._renewed > self._ttl:
            raise StoreLockedError(
                f"{self._objects.url}: the writer's lock could not be renewed for {self._ttl:g} s, so others may have "
                "taken it; see that the store can be reached"
            )

    def release(self) -> None:
        if self._released.is_set() or os.getpid() != self._pid:
            return
        self._released.set()
        self._thread.join()
        try:
            if self._is_ours(self._holder()):
                self._objects.delete(LOCK_NAME)
        except OSError as error:  # it expires by itself
            logger.warning("the writer's lock could not be removed: %s", error)

    def _take(self) -> None:
        started = time.monotonic()
        if not self._objects.create(LOCK_NAME, self._text()):
            holder = self._holder()
            if not self._is_ours(holder):
                if holder is not None and not _is_over(holder):
                    raise self._refusal(holder, "is being written")
                started = time.monotonic()
                self._objects.put(LOCK_NAME, self._text())
                # Others may have found it over, too: the last one to write has it.
                time.sleep(min(1.0, self._ttl / 4))
                holder = self._holder()
                if not self._is_ours(holder):
                    raise self._refusal(holder or b"", "is being written")
        self._renewed = started

    def _keep(self) -> None:
        while not self._released.wait(self._ttl / 3):
            try:
                started = time.monotonic()
                holder = self._holder()
                if not self._is_ours(holder):
                    self._taken_by = holder or b""
                    return
                self._objects.put(LOCK_NAME, self._text())
                self._renewed = started
            except OSError as error:
                logger.warning("the writer's lock could not be renewed: %s", error)

    def _holder(self) -> bytes | None:
        """Return the lock's text; None if nobody holds it."""
        try:
            return self._objects.read(LOCK_NAME)
        except FileNotFoundError:
            return None

    def _text(self) -> bytes:
        return orjson.dumps({**self._document, "heartbeat": time.time()})

    def _is_ours(self, holder: bytes | None) -> bool:
        return holder is not None and _parse(holder).get("token") == self._document["token"]

    def _refusal(self, holder: bytes, what: str) -> StoreLockedError:
        return StoreLockedError(
            f"{self._objects.url} {what} by {describe_holder(holder)}; close that writer, or open the directory for "
            f"reading (if no such process runs, wait {self._ttl:g} s or delete {LOCK_NAME})"
        )


def _is_over(holder: bytes) -> bool:
    """Return whether a lock's holder has given no sign of life for too long, or is known to be gone."""
    document = _parse(holder)
    try:
        if time.time() - float(document["heartbeat"]) > float(document["ttl"]):
            return True
        here = holder_document()["host"], _pid_namespace()
        if here[1] is None or (document["host"], document["pid_namespace"]) != here:
            return False
        os.kill(int(document["pid"]), 0)
    except ProcessLookupError:
        return True
    except (KeyError, TypeError, ValueError, OverflowError, PermissionError):
        return False  # written by something else, or by another user's process: let people decide
    return False


def _parse(holder: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(holder)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _pid_namespace() -> int | None:
    """Return what tells containers of one host apart, whose process ids mean different processes."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _flat(piece: Buffer) -> memoryview:
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _for_each(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call a function for all items, several at once; the first error is raised when all have ended."""
    if len(items) < 2:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(min(_CONNECTIONS, len(items)), "trajstore-remote") as pool:
        for done in [pool.submit(function, item) for item in items]:
            done.result()
