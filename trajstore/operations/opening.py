"""Readers of directories that may be damaged: they show what is whole."""

from __future__ import annotations

import re
from pathlib import Path

from trajstore.core.buffer.reader import Reader
from trajstore.core.store.sealed import without_advice
from trajstore.errors import StoreError, StoreNotFoundError, UnsupportedVersionError

_ADVICE = re.compile(r"[,;] (or )?load with strict=False[^;]*")
"""What only code can do."""


def open_readable(
    path: str | Path, pin: str | None = None, *, verify_shards: bool = False
) -> tuple[Reader, str | None]:
    """Return a reader of what is whole in a directory, and what is damaged; None if nothing is.

    Warnings name what is left out.

    Args:
        path: directory or URL.
        pin: name of a pin, whose trajectories are shown.
        verify_shards: compare the checksums of each shard when it is read for the first time.

    Raises:
        StoreNotFoundError: there is nothing that can be read.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: nothing can be read.
    """
    try:
        return Reader.open(path, pin=pin, verify_shards=verify_shards), None
    except (StoreNotFoundError, UnsupportedVersionError):
        raise
    except StoreError as error:
        reader = Reader.open(path, pin=pin, strict=False, verify_shards=verify_shards)
        return reader, _ADVICE.sub("", without_advice(str(error)))
