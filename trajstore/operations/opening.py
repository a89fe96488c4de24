"""Open directories that may be damaged or have a writer, whose evicted files are not damage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from trajstore._core.buffer.loading import LoadRequest
from trajstore._core.buffer.reader import Reader, load_reader
from trajstore._core.files.base import Directory, ReaderLease
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog, oldest_generation
from trajstore._core.store.salvage import open_leniently
from trajstore._core.store.saved_points import Pins
from trajstore._core.store.sealed import without_advice
from trajstore.errors import CorruptStoreError, StoreError, StoreNotFoundError, UnsupportedVersionError

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


@contextmanager
def announced(directory: Directory) -> Iterator[ReaderLease]:
    """Lease a store that has a writer, so that evicted files stay until this context ends.

    Writes nothing to a checkpoint or to a store without a writer. Where no lease can be written (read-only, or another
    user's store), files may disappear meanwhile; :func:`needed_now` distinguishes these from lost ones.

    Args:
        directory: directory of the store.

    Yields:
        The lease; settle it at the generation that is read.
    """
    lease = directory.announce_reader(oldest_generation(directory)) if directory.is_written() else ReaderLease()
    try:
        yield lease
    finally:
        lease.release()


def needed_files(catalog: Catalog) -> set[str]:
    """Return the names of the files needed by live and pinned trajectories."""
    rows = np.flatnonzero(catalog.needed_shards())
    return {name for _, names, _ in catalog.shards.file_sizes(rows) for name in names}


def needed_now(directory: Directory) -> tuple[Catalog, set[str]]:
    """Return a store's present catalog and the names of its shard files.

    A missing file that is not among these names was evicted or moved to another shard meanwhile.

    Raises:
        StoreError: the store is gone, or too damaged to read.
    """
    catalog, _ = open_leniently(directory)
    return catalog, needed_files(catalog)


def is_absent(directory: Directory, name: str) -> bool:
    """Return whether a file is absent now."""
    try:
        directory.size(name)
    except FileNotFoundError:
        return True
    except CorruptStoreError:  # a folder or pipe of this name
        return False
    return False


def states_now(directory: Directory) -> set[str] | None:
    """Return the names of the state and late-value files of all snapshots now; None if a snapshot is damaged."""
    pins = Pins(directory)
    try:
        pins.load()
    except StoreError:
        return None
    return {file.name for head in pins.heads.values() for file in head.files}
