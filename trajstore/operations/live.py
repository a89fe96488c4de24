"""Read a store that may have a writer: files evicted meanwhile are not damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from trajstore._core.files.base import Directory, ReaderLease
from trajstore._core.store.catalog import Catalog, oldest_generation
from trajstore._core.store.salvage import open_leniently
from trajstore._core.store.saved_points import Pins
from trajstore.errors import CorruptStoreError, StoreError


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
