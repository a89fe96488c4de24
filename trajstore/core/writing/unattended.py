"""Holds a store's log for a tool, without a buffer, listeners or additions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trajstore.core.files.base import Directory
from trajstore.core.store.sealed import METADATA_NAME, parse_metadata
from trajstore.core.writing.commit_log import CommitLog
from trajstore.core.writing.commits import CommitListener
from trajstore.core.writing.inbox import Inbox
from trajstore.core.writing.opening import lock_store
from trajstore.core.writing.points import Points

_NEVER = 1 << 62  # bytes of the log after which the index is written; a tool appends nothing


class _Nobody(CommitListener):
    """Ignores changes; keeps the seed in ``metadata.json``."""

    def __init__(self, seed: Any) -> None:
        self._seed = seed

    def metadata(self) -> Mapping[str, Any]:
        return {"seed": self._seed}


@contextmanager
def held_log(directory: Directory) -> Iterator[CommitLog]:
    """Yield the log of a store, as its single writer.

    Raises:
        ConfigurationError, StoreLockedError, StoreWriteError: see :func:`lock_store`.
        CorruptStoreError, UnsupportedVersionError: it cannot be continued.
    """
    source = f"{directory.url}/{METADATA_NAME}"
    metadata = parse_metadata(directory.read(METADATA_NAME), source)
    with lock_store(directory):
        log = CommitLog(directory, str(metadata.get("trajectory_format")), _NEVER, _Nobody(metadata.get("seed")))
        yield log
        log.close()


@contextmanager
def held_points(directory: Directory) -> Iterator[Points]:
    """Yield the saved points of a store, as its single writer; raises the errors of :func:`held_log`."""
    with held_log(directory) as log:
        yield Points(log, Inbox(log))
