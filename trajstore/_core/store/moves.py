"""Log records that move trajectories to a new shard, with unchanged ids, UUIDs and values. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.additions import check_rows, expanded
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import integers
from trajstore._core.store.row_location import STARTS
from trajstore.errors import CorruptStoreError


@dataclass(frozen=True, slots=True)
class Moved:
    """A shard with trajectories of other shards was added.

    Attributes:
        row: of the new shard.
        ids: of its trajectories, in order; those evicted before the commit are ignored.
        starts: the first row of each trajectory, by index column.
    """

    row: int
    ids: npt.NDArray[np.int64]
    starts: Mapping[str, npt.NDArray[np.int64]]

    def locations(self, table: int) -> npt.NDArray[np.int64]:
        """Return the row locations of the trajectories, ``[ids, 4]``, in the order of ``RowLocation``.

        Args:
            table: number of the new shard for its reader: its row, or a slot.
        """
        return np.stack([np.full(len(self.ids), table), *(self.starts[name] for name in STARTS)], axis=1)


def move_from_json(value: Mapping[str, Any], manifest: ShardManifest) -> tuple[IntArray, IntArray]:
    """Return ids ``[n]`` and extents ``[n, 4]`` of a record's trajectories in a new shard.

    Raises:
        CorruptStoreError: they do not add up to the shard's rows, or their ids are not ranges.
        KeyError, TypeError, ValueError: values are absent or of the wrong kind.
    """
    extents = integers(value["extents"], 4)
    check_rows(extents, manifest)
    return expanded([value["ids"]], np.array([len(extents)])), extents


def check_moved(index: TrajectoryIndex, ids: IntArray, extents: IntArray, fitting: npt.NDArray[np.bool_]) -> None:
    """Refuse a move if index entries and new shard disagree.

    Args:
        index: with the entries.
        ids: of the trajectories in the new shard.
        extents: of each, ``[n, 4]``.
        fitting: per row of the shard table, whether that shard has the columns of the new one.

    Raises:
        CorruptStoreError: rows of another trajectory, or outside the shard, would be read.
    """
    positions = index.find_many(ids)
    known = positions >= 0
    equal = np.array_equal(extents[known], index.extents(positions[known]))
    if not equal or not fitting[index.at("shard", positions[known])].all():
        raise CorruptStoreError("a trajectory would be moved to a shard that does not hold it")
