"""Where a store is mirrored to, and what is known of it. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from trajstore.core.base.arguments import check_instance, check_kind, path_or_url
from trajstore.core.base.settings import Seconds, Settings

MIRRORED_NAME = "mirrored.json"
"""In a store's directory: what its mirror has, for tools. Renewed by the writer, not part of the store."""

_MAPPING = partial(check_instance, kind=Mapping, wanted="a dict")


@dataclass(frozen=True)
class Mirror(Settings):
    """Where a store is mirrored to.

    Attributes:
        url: directory or fsspec URL (``s3://bucket/run``); nobody else writes there.
        storage_options: passed on to the fsspec file system.
        interval: seconds between two looks at what is new, while the mirror is not behind.
        close_timeout: seconds that ``close`` waits for what is not on the mirror yet.

    Raises:
        ConfigurationError: a value is out of range.
    """

    url: Annotated[str | Path, path_or_url]
    storage_options: Annotated[Mapping[str, Any], _MAPPING] = field(default_factory=dict)
    interval: Seconds = 1.0
    close_timeout: Seconds = 60.0


def as_mirror(mirror: str | Path | Mirror) -> Mirror:
    """Return the argument ``mirror`` of a buffer as options; a path or URL has the usual ones.

    Raises:
        ConfigurationError: it is something else.
    """
    check_kind("mirror", mirror, str | Path | Mirror, "a path, a URL, or a Mirror")
    return mirror if isinstance(mirror, Mirror) else Mirror(mirror)


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What is known of a mirror.

    Attributes:
        url: where it is.
        generation: of the store, that the mirror shows; -1 while nothing is known.
        newest_id: the watermark: every trajectory of the store up to this id is on the mirror, unless it was evicted;
            -1 before the first.
        at: Unix time of the last publication; None before the first.
        error: why the last attempt failed; None when it did not.
        failures: attempts that have failed since the last one that did not.
    """

    url: str
    generation: int = -1
    newest_id: int = -1
    at: float | None = None
    error: str | None = None
    failures: int = 0
