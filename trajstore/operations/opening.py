"""Open possibly damaged directories and show their intact part."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from trajstore._core.buffer.loading import LoadRequest
from trajstore._core.buffer.reader import Reader, load_reader
from trajstore._core.files.opening import open_directory
from trajstore._core.store.sealed import without_advice
from trajstore.errors import StoreError, StoreNotFoundError, UnsupportedVersionError

_ADVICE = re.compile(r"[,;] (or )?load with strict=False[^;]*")
"""Advice that applies only to code."""


def open_readable(
    path: str | Path, pin: str | None = None, *, verify_shards: bool = False, pending: bool = True
) -> tuple[Reader, str | None]:
    """Return a reader of a directory's intact part, and a sentence on the damage or None.

    Warnings name the parts left out.

    Args:
        path: directory or URL.
        pin: show the trajectories of this pin.
        verify_shards: compare the checksums of each shard on its first read.
        pending: show late values that wait in the inbox; of a pin, none are shown.

    Raises:
        StoreNotFoundError: the directory has no readable store.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: nothing can be read.
    """
    request = LoadRequest(open_directory(path), pin=pin, pending=pending)
    try:
        return load_reader(request, verify_shards=verify_shards), None
    except (StoreNotFoundError, UnsupportedVersionError):
        raise
    except StoreError as error:
        reader = load_reader(replace(request, strict=False), verify_shards=verify_shards)
        return reader, _ADVICE.sub("", without_advice(str(error)))
