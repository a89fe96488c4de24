"""The page's contents: a directory, or the pool in it. Thin."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trajstore._core.store.catalog import Catalog
from trajstore.errors import CorruptStoreError
from trajstore.operations.opening import open_readable
from trajstore.operations.pools import Pool, pool_support
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query

logger = logging.getLogger(__name__)

_LIST_APART = 5.0
"""Seconds between two listings of the points of a store without a pool: one is a request if the store is far away."""


class Shown:
    """The contents of a store, a checkpoint, a run or a directory of RLinf; for a pool's store, the pool.

    Args:
        path: directory or URL.
        pin: show the trajectories of this pin; None: the newest.
        copied: for a bundle: compare the checksums of each shard, and show late values that wait in the inbox.

    Raises:
        StoreNotFoundError: there is nothing to show.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: nothing is readable.
    """

    pool: Pool | None = None
    """The experience pool; None if the source is not one."""

    def __init__(self, path: str | Path, *, pin: str | None = None, copied: bool = False) -> None:
        self.path, self.pin = str(path), pin
        """Display name, and the pin that is shown; None: the newest state."""
        self._reader, damage = open_readable(path, pin, verify_shards=copied, pending=copied)
        self._unread = damage and f"A part of the store cannot be shown: {damage}"
        self.damage = self._unread
        """Sentence on the part that cannot be shown; None if all can."""
        support = pool_support()
        self._records = None if support is None else support.records(self._reader)
        self._is_seen = False
        """Whether the pool matches the reader's state."""
        self._listed = time.monotonic()
        self._look()

    def __len__(self) -> int:
        """Return the number of visible trajectories."""
        return len(self._reader if self.pool is None else self.pool)

    def query(self) -> Query:
        """Return a query over the trajectories."""
        return self._reader.query() if self.pool is None else self.pool.query()

    def get(self, shown: str) -> AnyTrajectory:
        """Return a trajectory by its id as displayed.

        Raises:
            TrajectoryUnavailableError: there is no such trajectory.
        """
        return self._reader.get(shown) if self.pool is None else self.pool.get(shown)

    def _look(self) -> None:
        try:
            self.pool = None if self._records is None else self._records.look()
        except CorruptStoreError as error:  # may be temporary while the directory is replaced
            unread = f"the pool cannot be read, so the whole store is shown: {error}"
            self.pool, self.damage = None, "; ".join(filter(None, (self._unread, unread)))
        else:
            self._is_seen, self.damage = True, self._unread

    def _is_current(self) -> bool:
        """Return whether no point was saved; of a store without a pool, looks only every few seconds."""
        if self._records is None or (self.pool is None and time.monotonic() - self._listed < _LIST_APART):
            return True
        self._listed = time.monotonic()
        return self._records.is_current()

    def refresh(self) -> bool:
        """Show new contents; return whether they changed."""
        changed = self._reader.refresh()
        if changed or not self._is_current():
            self._is_seen = False
        if self._is_seen:
            return False
        before = self.pool, self.damage
        self._look()
        return changed or before != (self.pool, self.damage)

    def shows(self, trajectory_id: int) -> bool:
        """Return whether a trajectory is shown."""
        return self._reader._live.locked(lambda contents: contents.index.find(trajectory_id) is not None)

    def catalogs(self) -> Mapping[int, Catalog]:
        """Return the stores' catalogs by rank, which have the late values."""
        return self._reader._live.catalogs_by_rank()

    def close(self) -> None:
        """Release the reader's lease."""
        self._reader.close()
