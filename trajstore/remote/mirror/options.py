"""Options and state of a mirror. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from trajstore._core.base.arguments import check_instance, check_kind, path_or_url
from trajstore._core.base.settings import Seconds, Settings

_MAPPING = partial(check_instance, kind=Mapping, wanted="a dict")


@dataclass(frozen=True)
class Mirror(Settings):
    """Options of a store's mirror.

    Attributes:
        url: directory or fsspec URL (``s3://bucket/run``) that nothing else writes to.
        storage_options: passed on to the fsspec file system.
        interval: seconds between checks for news, while the mirror is not behind.
        close_timeout: seconds that ``close`` waits for pending copies.

    Raises:
        ConfigurationError: a value is out of range.
    """

    url: Annotated[str | Path, path_or_url]
    storage_options: Annotated[Mapping[str, Any], _MAPPING] = field(default_factory=dict)
    interval: Seconds = 1.0
    close_timeout: Seconds = 60.0


def as_mirror(mirror: str | Path | Mirror) -> Mirror:
    """Convert a buffer's argument ``mirror`` to options; a path or URL gets the defaults.

    Raises:
        ConfigurationError: it has another type.
    """
    check_kind("mirror", mirror, str | Path | Mirror, "a path, a URL, or a Mirror")
    return mirror if isinstance(mirror, Mirror) else Mirror(mirror)


@dataclass(frozen=True, slots=True)
class MirrorState:
    """State of a mirror.

    Attributes:
        url: of the mirror.
        generation: of the store, that the mirror shows; -1 if unknown.
        newest_id: the watermark: every trajectory of the store up to this id is on the mirror, unless it was evicted;
            -1 before the first.
        at: Unix time of the last publication; None before the first.
        error: of the last attempt; None if it succeeded.
        failures: failed attempts since the last success.
    """

    url: str
    generation: int = -1
    newest_id: int = -1
    at: float | None = None
    error: str | None = None
    failures: int = 0
