"""Log records that move trajectories to a new shard: the same ids, UUIDs and values, in other files. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.schema import Extent
from trajstore.core.formats.base import ShardManifest
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.log_records import natural, parse_ranges, ranges_of
from trajstore.core.store.row_location import STARTS
from trajstore.errors import CorruptStoreError


@dataclass(frozen=True, slots=True)
class Moved:
    """A commit brought a shard that holds what other shards held.

    Attributes:
        row: of the new shard.
        ids: of the trajectories in it, in order; those that were evicted before the commit are passed over.
        starts: by column of the index, the first row of each.
    """

    row: int
    ids: npt.NDArray[np.int64]
    starts: Mapping[str, npt.NDArray[np.int64]]

    def locations(self, table: int) -> npt.NDArray[np.int64]:
        """Return where the rows of each trajectory are, ``[ids, 4]``, as a ``RowLocation`` has them.

        Args:
            table: number of the new shard for whoever shows it: its row, or a slot.
        """
        return np.stack([np.full(len(self.ids), table), *(self.starts[name] for name in STARTS)], axis=1)


def move_to_json(ids: Sequence[int], extents: Sequence[Extent]) -> dict[str, Any]:
    """Return what a record says of the trajectories in the new shard, as JSON values; ids are ascending."""
    return {"ids": ranges_of(ids), "extents": [[e.steps, e.batch, e.extra, e.document] for e in extents]}


def move_from_json(value: Mapping[str, Any], manifest: ShardManifest) -> tuple[npt.NDArray[np.int64], list[Extent]]:
    """Return ids and extents of the trajectories that a record says are in a new shard.

    Raises:
        CorruptStoreError: they do not add up to the shard's rows, or their ids are no ranges.
        KeyError, TypeError, ValueError: values are absent or of the wrong kind.
    """
    extents = [Extent(*(natural(n) for n in item)) for item in value["extents"]]
    ranges = parse_ranges(value["ids"]).tolist()
    if sum(last - first + 1 for first, last in ranges) != len(extents):  # before they are listed: they may be many
        raise CorruptStoreError(f"{len(extents)} trajectories, but the ids {value['ids']}")
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
    """Refuse a move after which the entries of an index would say something else than the new shard.

    Args:
        index: with the entries.
        ids: of the trajectories in the new shard.
        extents: of each.
        fitting: per row of the shard table, whether that shard has the columns of the new one.

    Raises:
        CorruptStoreError: rows would be read that are another trajectory's, or outside of the shard.
    """
    positions = index.find_many(ids.tolist())
    known = positions >= 0
    told = np.array([(e.steps, e.batch, e.extra, e.document) for e in extents], np.int64).reshape(-1, 4)[known]
    have = np.stack([index.at(name, positions[known]) for name in ("steps", "batch", "extra", "document")], axis=1)
    if not np.array_equal(told, have) or not fitting[index.at("shard", positions[known])].all():
        raise CorruptStoreError("a trajectory would be moved to a shard that does not hold it")
