"""Object stores' responses through fsspec: versions, times and failed conditions."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)

_MODIFIED_KEYS = ("LastModified", "last_modified", "updated", "mtime", "created")

NEVER = '"00000000000000000000000000000000"'
"""A version that no object has."""

_REFUSALS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
"""S3 error codes for a failed condition."""


class ConflictError(OSError):
    """A request's condition failed: another process has changed the object."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's metadata from the store.

    Attributes:
        size: in bytes.
        version: changes when the object is replaced (as far as the store reports it).
        modified: Unix time of the last write, by the store's clock; None if unknown.
    """

    size: int
    version: str
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class Stamped:
    """An object's content, version and age.

    Attributes:
        data: its bytes.
        version: for :meth:`ObjectStore.put_if`.
        age: seconds since the last write, by the store's clock alone; None if unknown.
    """

    data: bytes
    version: str
    age: float | None


@contextmanager
def conflicts(*, may_be_gone: bool = True) -> Iterator[None]:
    """Convert backend errors for a failed condition to ``ConflictError``.

    Args:
        may_be_gone: an absent object counts too (the response to ``If-Match``). Otherwise the bucket is absent.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not may_be_gone:
            raise
        raise ConflictError(errno.ENOENT, "it is gone") from error
    except OSError as error:
        if _is_refusal(error):
            raise ConflictError(errno.EBUSY, "it has changed") from error
        raise


def _is_refusal(error: OSError) -> bool:
    """Return whether a server reported a failed condition; s3fs has it in the error's cause only."""
    if isinstance(error, FileExistsError):
        return True
    answer = getattr(error.__cause__, "response", None)
    return isinstance(answer, dict) and str(answer.get("Error", {}).get("Code")) in _REFUSALS


def refuses(request: Callable[[], object]) -> bool:
    """Return whether the server refuses a request that it must refuse."""
    try:
        request()
    except OSError as error:
        if _is_refusal(error):
            return True
        if error.errno == errno.ENOSYS:  # the server does not implement the condition
            return False
        raise
    return False


def info_of(found: dict[str, Any]) -> ObjectInfo:
    """Parse fsspec's metadata of an object."""
    version = "|".join(str(found[key]) for key in _VERSION_KEYS if found.get(key) is not None)
    times = [found[key] for key in _MODIFIED_KEYS if found.get(key) is not None]
    return ObjectInfo(int(found["size"]), version, unix_time(times[0]) if times else None)


def unix_time(moment: Any) -> float | None:
    """Convert a backend's time to Unix time; None for an unknown type."""
    if isinstance(moment, datetime):
        return moment.timestamp()
    if isinstance(moment, int | float):
        return float(moment)
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(moment).timestamp()
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(moment).timestamp()
    return None
