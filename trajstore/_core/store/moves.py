"""Log records that move trajectories to a new shard, with unchanged ids, UUIDs and values. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.schema import Extent
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import natural, parse_ranges, ranges_of
from trajstore._core.store.row_location import STARTS
from trajstore.errors import CorruptStoreError, trajectories


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


def move_to_json(ids: Sequence[int], extents: Sequence[Extent]) -> dict[str, Any]:
    """Return the trajectories in the new shard as JSON values for a record; ids are ascending."""
    return {"ids": ranges_of(ids), "extents": [[e.steps, e.batch, e.extra, e.document] for e in extents]}


def move_from_json(value: Mapping[str, Any], manifest: ShardManifest) -> tuple[npt.NDArray[np.int64], list[Extent]]:
    """Return ids and extents of a record's trajectories in a new shard.

    Raises:
        CorruptStoreError: they do not add up to the shard's rows, or their ids are not ranges.
        KeyError, TypeError, ValueError: values are absent or of the wrong kind.
    """
    extents = [Extent(*(natural(n) for n in item)) for item in value["extents"]]
    ranges = parse_ranges(value["ids"]).tolist()
    if sum(last - first + 1 for first, last in ranges) != len(extents):  # checked first: the ranges may be huge
        raise CorruptStoreError(f"{trajectories(len(extents))}, but the ids {value['ids']}")
    for column, rows in zip(manifest.schema.columns, manifest.rows, strict=True):
        if sum(extent.rows(column.axis) for extent in extents) != rows:
            raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {rows} rows")
    return np.array([number for first, last in ranges for number in range(first, last + 1)], np.int64), extents


def move_entries(index: TrajectoryIndex, moved: Moved) -> None:
    """Point the entries of an index to the new shard."""
    positions = index.find_many(moved.ids.tolist())
    known = positions >= 0
    index.point(positions[known], moved.locations(moved.row)[known])


def check_moved(
    index: TrajectoryIndex, ids: npt.NDArray[np.int64], extents: Sequence[Extent], fitting: npt.NDArray[np.bool_]
) -> None:
    """Refuse a move if index entries and new shard disagree.

    Args:
        index: with the entries.
        ids: of the trajectories in the new shard.
        extents: of each.
        fitting: per row of the shard table, whether that shard has the columns of the new one.

    Raises:
        CorruptStoreError: rows of another trajectory, or outside the shard, would be read.
    """
    positions = index.find_many(ids.tolist())
    known = positions >= 0
    moved_extents = np.array([(e.steps, e.batch, e.extra, e.document) for e in extents], np.int64).reshape(-1, 4)[known]
    index_extents = np.stack(
        [index.at(name, positions[known]) for name in ("steps", "batch", "extra", "document")], axis=1
    )
    if not np.array_equal(moved_extents, index_extents) or not fitting[index.at("shard", positions[known])].all():
        raise CorruptStoreError("a trajectory would be moved to a shard that does not hold it")
