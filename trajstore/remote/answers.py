"""What object stores answer, through fsspec: versions, times, and that a condition did not hold."""

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
"""Codes of S3 for a condition that does not hold."""


class ConflictError(OSError):
    """A condition of a request did not hold: somebody else has changed the object."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says of an object.

    Attributes:
        size: in bytes.
        version: a text that changes when the object is replaced (as far as the store tells).
        modified: when it was written, in Unix time by the store's clock; None where the store does not tell.
    """

    size: int
    version: str
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class Stamped:
    """An object as it was read.

    Attributes:
        data: its bytes.
        version: for :meth:`ObjectStore.put_if`.
        age: seconds since it was written, by the store's clock alone; None where the store does not tell.
    """

    data: bytes
    version: str
    age: float | None


@contextmanager
def conflicts(*, may_be_gone: bool = True) -> Iterator[None]:
    """Raise ``ConflictError`` for what says that a condition did not hold.

    Args:
        may_be_gone: that nothing is there says so, too (the answer to ``If-Match``). Otherwise the bucket is absent.
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
    """Return whether a server said that a condition does not hold. s3fs tells by its cause only, where it tells."""
    if isinstance(error, FileExistsError):
        return True
    answer = getattr(error.__cause__, "response", None)
    return isinstance(answer, dict) and str(answer.get("Error", {}).get("Code")) in _REFUSALS


def refuses(request: Callable[[], object]) -> bool:
    """Return whether a request that a server must refuse is refused."""
    try:
        request()
    except OSError as error:
        if _is_refusal(error):
            return True
        if error.errno == errno.ENOSYS:  # it knows the condition, and does not have it
            return False
        raise
    return False


def info_of(found: dict[str, Any]) -> ObjectInfo:
    """Return what fsspec's description of an object says."""
    version = "|".join(str(found[key]) for key in _VERSION_KEYS if found.get(key) is not None)
    times = [found[key] for key in _MODIFIED_KEYS if found.get(key) is not None]
    return ObjectInfo(int(found["size"]), version, unix_time(times[0]) if times else None)


def unix_time(moment: Any) -> float | None:
    """Return a moment as backends tell it, in Unix time; None if it is told in another way."""
    if isinstance(moment, datetime):
        return moment.timestamp()
    if isinstance(moment, int | float):
        return float(moment)
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(moment).timestamp()
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(moment).timestamp()
    return None
