"""The page's contents: a directory. Thin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trajstore._core.store.catalog import Catalog
from trajstore.operations.opening import open_readable
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query


class Shown:
    """The contents of a store, a checkpoint, a run or a directory of RLinf.

    Args:
        path: directory or URL.
        pin: show the trajectories of this pin; None: the newest.
        copied: for a bundle: compare the checksums of each shard, and show late values that wait in the inbox.

    Raises:
        StoreNotFoundError: there is nothing to show.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: nothing is readable.
    """

    def __init__(self, path: str | Path, *, pin: str | None = None, copied: bool = False) -> None:
        self.path, self.pin = str(path), pin
        """Display name, and the pin that is shown; None: the newest state."""
        self._reader, damage = open_readable(path, pin, verify_shards=copied, pending=copied)
        self.damage = damage and f"A part of the store cannot be shown: {damage}"
        """Sentence on the part that cannot be shown; None if all can."""

    def __len__(self) -> int:
        """Return the number of visible trajectories."""
        return len(self._reader)

    def query(self) -> Query:
        """Return a query over the trajectories."""
        return self._reader.query()

    def get(self, shown: str) -> AnyTrajectory:
        """Return a trajectory by its id as displayed.

        Raises:
            TrajectoryUnavailableError: there is no such trajectory.
        """
        return self._reader.get(shown)

    def refresh(self) -> bool:
        """Show new contents; return whether they changed."""
        return self._reader.refresh()

    def shows(self, trajectory_id: int) -> bool:
        """Return whether a trajectory is shown."""
        return self._reader._live.locked(lambda contents: contents.index.find(trajectory_id) is not None)

    def catalogs(self) -> Mapping[int, Catalog]:
        """Return the stores' catalogs by rank, which have the late values."""
        return self._reader._live.catalogs_by_rank()

    def close(self) -> None:
        """Release the reader's lease."""
        self._reader.close()
