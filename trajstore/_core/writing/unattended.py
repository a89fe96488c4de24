"""Holds a store's log for a tool, without a buffer, listeners or additions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trajstore._core.files.base import Directory
from trajstore._core.store.sealed import METADATA_NAME, parse_metadata
from trajstore._core.writing.commit_log import CommitLog
from trajstore._core.writing.inbox import Inbox
from trajstore._core.writing.opening import lock_store, warn_of_mirror
from trajstore._core.writing.points import StorePoints


@contextmanager
def held_log(directory: Directory, *, wait: bool = True) -> Iterator[CommitLog]:
    """Yield the log of a store, as its single writer for a moment.

    Args:
        directory: of the store.
        wait: wait for another tool that holds it for a moment.

    Raises:
        ConfigurationError, StoreLockedError, StoreWriteError: see :func:`lock_store`.
        CorruptStoreError, UnsupportedVersionError: it cannot be continued.
    """
    source = f"{directory.url}/{METADATA_NAME}"
    metadata = parse_metadata(directory.read(METADATA_NAME), source)
    kept = {name: metadata.get(name) for name in ("trajectory_format", "seed")}
    with lock_store(directory, brief=True, wait=wait):
        warn_of_mirror(directory)
        log = CommitLog(directory, lambda: kept)
        yield log
        log.close()


@contextmanager
def held_points(directory: Directory) -> Iterator[StorePoints]:
    """Yield the saved points of a store, as its single writer; raises the errors of :func:`held_log`."""
    with held_log(directory) as log:
        yield StorePoints(log, Inbox(log))
