"""Sources of the page's contents: a directory, a pool in it, or a handle of stores. Thin."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trajstore._core.sampling.base import Drawn
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import id_from
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError, listed
from trajstore.operations.opening import open_readable
from trajstore.operations.pools import Pool, pool_support
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    from trajstore.distributed import DistributedReplayBuffer
    from trajstore.query import Query

logger = logging.getLogger(__name__)

_LIST_APART = 5.0
"""Seconds between two listings of the points of a store without a pool: one is a request if the store is far away."""


class OfReader:
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
    limits: Sequence[str] = ()
    """Sentences on features that the page lacks for this source."""

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

    def read(self, drawn: Drawn, columns: Sequence[str]) -> dict[str, Any]:
        """Return rows of some columns."""
        return self._reader.read(drawn, columns=columns)

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


class OfHandle:
    """The contents of a handle of stores, with the members of :class:`OfReader`.

    Facts are fetched once per state, trajectories one by one. While a store does not answer, those of the others are
    visible, and ``damage`` names it.

    Args:
        handle: the handle; it is not closed here.

    Raises:
        StoreUnreachableError: no store answers.
    """

    damage: str | None = None
    pool: Pool | None = None
    pin: str | None = None
    limits = (
        "A handle of stores has only the latest late values, as facts. To see their history or set values, run "
        "`trajstore view` on a machine that has the directories.",
    )

    def __init__(self, handle: DistributedReplayBuffer) -> None:
        self._handle = handle
        self.path = f"stores {handle.name!r} of Ray"
        self._look()

    def __len__(self) -> int:
        return len(self._facts)

    def refresh(self) -> bool:
        self._handle.refresh()
        if self._absent == self._handle.absent and np.array_equal(self._ids, self._handle.trajectory_ids):
            return False
        self._look()
        return True

    def _look(self) -> None:
        self._facts = self._handle.query().table()
        self._absent, self._ids = self._handle.absent, self._handle.trajectory_ids
        names = listed(f"rank_{rank}" for rank in self._absent)
        self.damage = f"{self.path}: no answer from {names}; rollouts there are not shown" if names else None

    def query(self) -> Query:
        facts = self._facts
        return replace(self._handle.query(), facts=lambda: facts)

    def get(self, shown: str) -> AnyTrajectory:
        number = id_from("trajectory_id", shown)
        if not (self._facts["trajectory_id"] == number).any():  # avoids waiting for a store that does not exist
            raise TrajectoryUnavailableError(f"trajectory {shown}: does not exist, or was evicted")
        return self._handle.get(number)

    def read(self, drawn: Drawn, columns: Sequence[str]) -> dict[str, Any]:
        return self._handle.read(drawn, columns=columns)

    def catalogs(self) -> None:
        """Return None: the stores are not local."""

    def close(self) -> None:
        """Do nothing; the caller owns the handle."""


Shown: TypeAlias = OfReader | OfHandle
"""A source of trajectories for the page."""
