"""Objects below a URL: a remote directory's few fsspec calls, with errors that name the object."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from trajstore._core.files.base import Buffer
from trajstore.errors import ConfigurationError, MissingDependencyError
from trajstore.remote.answers import NEVER, ConflictError, ObjectInfo, Stamped, conflicts, info_of, refuses, unix_time
from trajstore.remote.bucket_ranges import BucketRanges, lost_by_fork
from trajstore.remote.uploads import upload

logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""Concurrent range requests of a file system."""

_ERRNO = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES}


class ObjectStore:
    """Objects by name below one URL. Listings are never cached.

    Thread-safe. A forked child opens its own connection. Failures are ``OSError``
    for any backend; ``FileNotFoundError`` when the object is absent.

    Args:
        url: an fsspec URL, ``s3://bucket/folder``.
        options: storage options of its file system.

    Raises:
        MissingDependencyError: the file system's package is not installed.
        ConfigurationError: unknown scheme, or options it does not accept.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._options = options
        self._opened: tuple[int, Any, str] | None = None
        self._ranges: tuple[int, BucketRanges | None] | None = None
        self.keeps_create = False
        """Whether the store was seen to refuse to create an existing object."""
        self.keeps_match = False
        """Whether the store was seen to refuse to replace an object of another version."""
        self._filesystem()

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url, self._options)

    def inner(self, name: str) -> ObjectStore:
        """Return the objects below a folder."""
        return ObjectStore(self.url_of(name), self._options)

    def url_of(self, name: str) -> str:
        """Return an object's URL, for messages."""
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{name}"

    def read(self, name: str, start: int = 0, *, in_parts: bool = False) -> bytes:
        """Return an object's bytes from ``start`` to its end; empty if it ends before ``start``.

        ``in_parts`` fetches parts of a large object at once, which needs a request for its size.
        """
        if start and start >= self.info(name).size:
            return b""  # object stores refuse empty ranges
        with self._at(name) as (fs, path):
            if start:
                return bytes(fs.cat_file(path, start=start))
            once = {} if in_parts or not self.takes_conditions else {"max_concurrency": 1}
            return bytes(fs.cat_file(path, **once))

    def ranges(self, pieces: Sequence[tuple[str, int, int]]) -> Generator[tuple[int, Buffer], None, None]:
        """Yield the bytes ``[start, stop)`` of objects, ``(name, start, stop)`` each, with their index in ``pieces``.

        They arrive in any order while others are in flight, so only some need memory at a time. S3 ranges are read
        through obstore. A server that it does not work with (some answer a range with status 200) is read through s3fs
        from then on, with a warning that says why.

        Raises:
            MissingDependencyError: obstore is not installed.
            OSError: a fetch failed; names the object.
        """
        fs, root = self._filesystem()
        full = [(root + name, start, stop) for name, start, stop in pieces]
        direct = self._bucket_ranges(fs, root)
        came = _by_filesystem(fs, full) if direct is None else self._by_obstore(direct, fs, full)
        with closing(came):
            for place, data in came:
                yield place, self._judged(pieces[place], data)

    def _by_obstore(
        self, direct: BucketRanges, fs: Any, pieces: Sequence[tuple[str, int, int]]
    ) -> Generator[tuple[int, Buffer | BaseException], None, None]:
        with closing(direct.fetch(pieces)) as came:
            for place, data in came:
                if not isinstance(data, OSError):
                    direct.has_worked = True
                elif not direct.has_worked and not isinstance(data, FileNotFoundError):
                    theirs = list(_by_filesystem(fs, pieces))
                    if not any(isinstance(part, BaseException) for _, part in theirs):
                        self._ranges = os.getpid(), None
                        logger.warning(
                            "%s: ranges are fetched by s3fs, more slowly than by obstore: %s", self.url, data
                        )
                        yield from theirs
                        return
                yield place, data

    def _bucket_ranges(self, fs: Any, root: str) -> BucketRanges | None:
        """Return this process's range reader; None if the file system reads ranges itself."""
        if not self.takes_conditions:
            return None
        if self._ranges is None or self._ranges[0] != os.getpid():
            if lost_by_fork():
                self._ranges = os.getpid(), None
                logger.warning(
                    "%s: ranges are fetched by s3fs, more slowly than by obstore, which does not work in a process "
                    "forked from one that used it; start processes by 'spawn' or 'forkserver', or before the "
                    "first batch",
                    self.url,
                )
                return None
            with self._naming(""):
                self._ranges = os.getpid(), BucketRanges(fs, fs.split_path(root)[0])
        return self._ranges[1]

    def _judged(self, piece: tuple[str, int, int], found: Buffer | BaseException) -> Buffer:
        """Check the result of a range request and return its bytes.

        Raises:
            OSError: the request failed, or returned too few bytes.
        """
        name, start, stop = piece
        with self._naming(name):
            if isinstance(found, BaseException):
                raise found
            if len(found) != stop - start:
                raise OSError(errno.EIO, f"{len(found):,} bytes arrived of {stop - start:,} from {start:,} on")
        return found

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing an existing one."""
        with self._at(name) as (fs, path):
            if self.takes_conditions:
                upload(fs, path, data)
            else:
                fs.pipe_file(path, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if it is absent; return whether it was absent.

        Atomic on S3 (``If-None-Match``) and other backends that support fsspec's mode ``create``; elsewhere the check
        is racy: two concurrent callers can both succeed.
        """
        with self._at(name) as (fs, path):
            if not self.keeps_create and self.version(name) is not None:
                return False
            try:
                if self.takes_conditions:
                    with conflicts(may_be_gone=False):
                        upload(fs, path, data, IfNoneMatch="*")
                else:
                    fs.pipe_file(path, data, mode="create")
            except (FileExistsError, ConflictError):
                return False
            return True

    def info(self, name: str) -> ObjectInfo:
        """Return an object's metadata."""
        with self._at(name, fresh=True) as (fs, path):
            if self.takes_conditions:
                answer = fs.call_s3("head_object", **_address(path))
                return info_of({**answer, "size": answer["ContentLength"]})
            info = fs.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(errno.ENOENT, f"is a {info['type']}")
            return info_of(info)

    # -- conditions -------------------------------------------------------------------------------

    @property
    def takes_conditions(self) -> bool:
        """Whether requests can carry conditions: on S3. :meth:`probe` shows whether the server enforces them."""
        fs, _ = self._filesystem()
        protocol = fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)
        return "s3" in protocol and hasattr(fs, "call_s3")

    @property
    def is_of_this_process(self) -> bool:
        """Whether the objects live in this process's memory, where no other process can write them."""
        fs, _ = self._filesystem()
        return bool(fs.protocol == "memory")

    def probe(self, name: str, data: bytes) -> None:
        """Find out which conditions the server enforces, with requests that it must refuse.

        Args:
            name: of an existing object of the caller's own.
            data: its content: a server that does not refuse writes it again.
        """
        if not self.takes_conditions:
            return
        with self._at(name) as (fs, path):
            self.keeps_create = refuses(lambda: upload(fs, path, data, IfNoneMatch="*"))
            self.keeps_match = refuses(lambda: upload(fs, path, data, IfMatch=NEVER))

    def stamped(self, name: str) -> Stamped:
        """Return an object with its version and age, consistently."""
        if not self.takes_conditions:
            return Stamped(self.read(name), "", None)
        from fsspec.asyn import sync

        with self._at(name) as (fs, path):
            bucket, key, _ = fs.split_path(path)
            response = fs.call_s3("get_object", Bucket=bucket, Key=key)
            data = sync(fs.loop, response["Body"].read)  # a body must be read in the event loop that fetched it
            now = unix_time(response["ResponseMetadata"]["HTTPHeaders"].get("date"))
            age = None if now is None else now - response["LastModified"].timestamp()
            return Stamped(data, response["ETag"], age)

    def version(self, name: str) -> str | None:
        """Return an object's version, for :meth:`put_if`; None if it is absent."""
        with self._at(name, fresh=True) as (fs, path):
            try:
                if self.takes_conditions:
                    return str(fs.call_s3("head_object", **_address(path))["ETag"])
                return str(fs.info(path).get("ETag", ""))
            except FileNotFoundError:
                return None

    def put_if(self, name: str, data: bytes, version: str | None) -> str:
        """Write an object if it has this version, or, with None, if it is absent; return its new version.

        Without :attr:`takes_conditions`, or on a server that does not enforce them, it is written unconditionally.

        Raises:
            ConflictError: it has another version, is absent, or exists.
        """
        if not self.takes_conditions:
            self.put(name, data)
            return ""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        with self._at(name) as (fs, path), conflicts(may_be_gone=version is not None):
            return upload(fs, path, data, **condition)

    def delete_if(self, name: str, version: str) -> None:
        """Remove an object if it has this version; an absent one is no error.

        Raises:
            ConflictError: it has another version.
        """
        if not self.takes_conditions:
            self.delete(name)
            return
        with self._at(name) as (fs, path), suppress(FileNotFoundError), conflicts():
            bucket, key, _ = fs.split_path(path)
            fs.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=version)

    # -- many objects -----------------------------------------------------------------------------

    def infos(self, below: str) -> dict[str, ObjectInfo]:
        """Return the metadata of all objects below a folder, by name, sorted, from one listing."""
        return {name: info_of(info) for name, info in self._find(below).items()}

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the sizes of all objects below a folder, by name, sorted."""
        return {name: int(info["size"]) for name, info in self._find(below).items()}

    def _find(self, below: str) -> dict[str, Any]:
        with self._at(below, fresh=True) as (fs, folder):
            try:
                if self.takes_conditions:
                    pages = _pages(fs, f"{folder.rstrip('/')}/")
                    objects = {path: info for page, bucket in pages for path, info in _objects(page, bucket)}
                else:
                    objects = fs.find(folder.rstrip("/"), detail=True)
            except FileNotFoundError:  # the bucket is absent
                return {}
        prefix = f"{folder}/" if below else folder
        chosen = sorted(path for path in objects if path.startswith(prefix) and not path.endswith("/"))
        return {path[len(folder) - len(below) :]: objects[path] for path in chosen}

    def listing(self, below: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the objects and of the folders directly below a folder, each sorted."""
        with self._at(below, fresh=True) as (fs, folder):
            try:
                if self.takes_conditions:
                    pages = list(_pages(fs, f"{folder.rstrip('/')}/", Delimiter="/"))
                    entries = [{"name": path, "type": "file"} for page in pages for path, _ in _objects(*page)]
                    entries += [
                        {"name": f"{bucket}/{item['Prefix']}", "type": "directory"}
                        for page, bucket in pages
                        for item in page.get("CommonPrefixes", ())
                    ]
                else:
                    entries = fs.ls(folder.rstrip("/"), detail=True)
            except FileNotFoundError:
                return [], []
        prefix = f"{folder}/" if below else folder
        kinds: dict[str, list[str]] = {"file": [], "directory": []}
        for item in entries:
            path = item["name"].rstrip("/")
            if path.startswith(prefix) and item["type"] in kinds:
                kinds[item["type"]].append(path[len(folder) - len(below) :])
        return sorted(kinds["file"]), sorted(kinds["directory"])

    def following(self, name: str) -> dict[str, str]:
        """Return the version of the object after a name, by its name; empty elsewhere than on S3."""
        if not self.takes_conditions:
            return {}
        with self._at("") as (fs, folder):
            start = _address(folder + name)["Key"]
            page, bucket = next(_pages(fs, folder, StartAfter=start, MaxKeys=2))
            return {path[len(folder) :]: info["ETag"] for path, info in _objects(page, bucket)}

    def versions(self, beginning: str, delimiter: str, pages: int) -> dict[str, str] | None:
        """Return the versions of all objects whose names begin so, by name, listed in this order.

        All whose names agree up to the first ``delimiter`` after ``beginning`` count as one, with that part of the name
        and no version.

        Returns:
            None if they take more than ``pages`` requests, or elsewhere than on S3.
        """
        if not self.takes_conditions:
            return None
        versions: dict[str, str] = {}
        with self._at(beginning) as (fs, path):
            length = len(path) - len(beginning)
            for number, (page, bucket) in enumerate(_pages(fs, path, Delimiter=delimiter), 1):
                versions |= {path[length:]: info["ETag"] for path, info in _objects(page, bucket)}
                versions |= {f"{bucket}/{item['Prefix']}"[length:]: "" for item in page.get("CommonPrefixes", ())}
                if page.get("IsTruncated") and number == pages:
                    return None
        return versions

    def any(self) -> bool:
        """Return whether any object exists."""
        with self._at("", fresh=True) as (fs, path):
            try:
                return bool(fs.ls(path.rstrip("/"), detail=False))
            except FileNotFoundError:
                return False

    def delete(self, name: str) -> None:
        """Remove an object; an absent one is no error."""
        with self._at(name) as (fs, path):
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                return

    def download(self, name: str, size: int, target: Path) -> None:
        """Copy an object, which has ``size`` bytes, to a local file."""
        with self._at(name) as (fs, path):
            fs.get_file(path, str(target))
            copied_bytes = target.stat().st_size
            if copied_bytes != size:
                raise OSError(errno.EIO, f"{copied_bytes:,} bytes arrived of {size:,}")

    def _filesystem(self) -> tuple[Any, str]:
        """Return this process's file system, and the URL's path with a trailing slash."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *_connect(self.url, self._options))
        return self._opened[1:]

    @contextmanager
    def _at(self, name: str, *, fresh: bool = False) -> Iterator[tuple[Any, str]]:
        """Yield the file system and an object's path; ``fresh`` drops cached metadata. Errors name the object."""
        fs, root = self._filesystem()
        with self._naming(name):
            if fresh:
                fs.invalidate_cache()
            yield fs, root + name

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        url = self.url_of(name)
        try:
            yield
        except ConflictError as error:
            raise ConflictError(errno.EBUSY, "another process has changed it", url) from error
        except MissingDependencyError:
            raise
        except OSError as error:
            number = error.errno or next((n for kind, n in _ERRNO.items() if isinstance(error, kind)), errno.EIO)
            raise OSError(number, error.strerror or str(error) or os.strerror(number), url) from error
        except Exception as error:  # backends share no class of network errors
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):  # at the first request
                raise ConfigurationError(f"{url}: storage_options: {error}; {OWN_OPTIONS}") from error
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


OWN_OPTIONS = "trajstore's own are cache_dir, cache_bytes, range_reads, lock_ttl, lease_ttl, others the backend's"


def _address(path: str) -> dict[str, str]:
    """Return bucket and key of a path."""
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _pages(fs: Any, folder: str, **more: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield S3's pages of a listing of a folder, each with the bucket: one request each, also for an empty folder."""
    bucket, _, prefix = folder.partition("/")
    while True:
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        yield page, bucket
        if not page.get("IsTruncated"):
            return
        more["ContinuationToken"] = page["NextContinuationToken"]


def _objects(page: dict[str, Any], bucket: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and metadata of each object of a page."""
    for item in page.get("Contents", ()):
        yield f"{bucket}/{item['Key']}", {**item, "size": item["Size"]}


def _by_filesystem(
    fs: Any, pieces: Sequence[tuple[str, int, int]]
) -> Generator[tuple[int, Buffer | BaseException], None, None]:
    """Yield the bytes of ranges, ``(path, start, stop)`` each, or the error, with their index."""
    more = {"batch_size": _AT_ONCE} if hasattr(fs, "loop") else {}
    paths, starts, stops = (list(column) for column in zip(*pieces, strict=True))
    try:
        parts = list(fs.cat_ranges(paths, starts, stops, on_error="return", **more))
    except Exception as error:  # backends share no class of errors; the caller names the object
        parts = [error] * len(pieces)
    yield from enumerate(parts)


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec.core

    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        if url.startswith(("s3://", "s3a://")):
            raise MissingDependencyError("s3fs", "s3") from error
        raise ConfigurationError(f"{url}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{url}: storage_options: {error}; {OWN_OPTIONS}") from error
    return fs, path.rstrip("/") + "/"
