"""Looking into a store that somebody may be writing: what is evicted meanwhile is no damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from trajstore.core.files.base import Directory, ReaderLease
from trajstore.core.store.catalog import Catalog, oldest_generation
from trajstore.core.store.salvage import open_leniently
from trajstore.core.store.saved_points import Pins
from trajstore.errors import CorruptStoreError, StoreError


@contextmanager
def announced(directory: Directory) -> Iterator[ReaderLease]:
    """Announce a reader of a store that has a writer, so that what it evicts stays until the end of this context.

    Nothing is written elsewhere: not into a store that nobody writes, nor into a checkpoint. Where nothing can be
    written (read-only, or another user's), files may disappear meanwhile: :func:`needed_now` tells them from lost ones.

    Args:
        directory: of the store.

    Yields:
        The lease; settle it at the generation that is looked at.
    """
    lease = directory.announce_reader(oldest_generation(directory)) if directory.is_written() else ReaderLease()
    try:
        yield lease
    finally:
        lease.release()


def needed_files(catalog: Catalog) -> set[str]:
    """Return the names of the files that live and pinned trajectories need."""
    rows = np.flatnonzero(catalog.needed_shards())
    return {name for _, names, _ in catalog.shards.file_sizes(rows) for name in names}


def needed_now(directory: Directory) -> tuple[Catalog, set[str]]:
    """Return a store as it is now, and the names of the files of its shards.

    What is missing and not among them was evicted, or moved to another shard, since it was looked for.

    Raises:
        StoreError: it is gone, or damaged beyond reading.
    """
    catalog, _ = open_leniently(directory)
    return catalog, needed_files(catalog)


def is_absent(directory: Directory, name: str) -> bool:
    """Return whether a file is not there at this moment."""
    try:
        directory.size(name)
    except FileNotFoundError:
        return True
    except CorruptStoreError:  # a folder or pipe in place of it
        return False
    return False


def states_now(directory: Directory) -> set[str] | None:
    """Return the names of the states and late values of all snapshots as they are now; None if one is damaged."""
    pins = Pins(directory)
    try:
        pins.load()
    except StoreError:
        return None
    return {file.name for head in pins.heads.values() for file in head.files}
