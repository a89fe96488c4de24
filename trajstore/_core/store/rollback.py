"""Plans going to a snapshot: evicted and restored trajectories. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore._core.store.catalog import Catalog
from trajstore._core.store.log_records import id_ranges
from trajstore._core.store.notes import Notes
from trajstore._core.store.saved_points import Snapshot
from trajstore.errors import CorruptStoreError, trajectories


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes made by going to a snapshot.

    Attributes:
        to: the snapshot.
        notes: its late values.
        line: names of the existing saved points on its line.
        leaving: ids of live trajectories that are not in the snapshot, ascending.
        returning: ids of the snapshot's trajectories that are not live, ascending.
        points: saved points of the current line that are not on the snapshot's.
        nbytes: of the trajectories that leave.
        values: number of current late values that are not in the snapshot.
        values_back: number of the snapshot's late values that are not current.
    """

    to: Snapshot
    notes: Notes
    line: tuple[str, ...]
    leaving: npt.NDArray[np.int64]
    returning: npt.NDArray[np.int64]
    points: tuple[Snapshot, ...]
    nbytes: int
    values: int
    values_back: int
    _line_differs: bool

    @property
    def is_empty(self) -> bool:
        """Whether the store already equals the snapshot."""
        return not (len(self.leaving) or len(self.returning) or self.values or self.values_back or self._line_differs)


def plan_change(catalog: Catalog, to: Snapshot) -> Plan:
    """Return the changes made by going to a snapshot.

    Raises:
        CorruptStoreError: the store lacks trajectories or values of the snapshot.
    """
    notes = catalog.values_of(to)
    staying = catalog.index.positions_in(to.ids)
    returning = catalog.pinned.positions_in(to.ids)
    if len(staying) + len(returning) != to.count:
        raise CorruptStoreError(
            f"{catalog.directory.url}: the snapshot {to.name} names {trajectories(to.count)}, of which "
            f"{to.count - len(staying) - len(returning):,} cannot be found; go to another one"
        )
    leaves = np.ones(len(catalog.index), np.bool_)
    leaves[staying - catalog.index.first] = False
    present, line = catalog.points(), catalog.present_line(to)
    mine = catalog.notes.kept(catalog.index["trajectory_id"])
    return Plan(
        to,
        notes,
        line,
        np.sort(catalog.index["trajectory_id"][leaves]),
        np.sort(catalog.pinned.at("trajectory_id", returning)),
        tuple(head for head in present if head.name not in line),
        int(catalog.index["nbytes"][leaves].sum()),
        mine.count_not_in(notes),
        notes.count_not_in(mine),
        tuple(head.name for head in present) != line,
    )


def has_a_name(catalog: Catalog, reachable: Iterable[str]) -> bool:
    """Return whether the head equals a head that was left, or one of some saved points.

    Args:
        catalog: of the store.
        reachable: names of the saved points to compare with.
    """
    ids, line = catalog.index["trajectory_id"], tuple(head.name for head in catalog.points())
    ranges, notes, counts = id_ranges(ids), catalog.notes.kept(ids), set(reachable)
    for head in catalog.snapshots():
        if head.kind == "pin" or (head.kind == "point" and head.name not in counts):
            continue
        if np.array_equal(head.ids, ranges) and catalog.present_line(head) == line:
            theirs = catalog.values_of(head)
            if not notes.count_not_in(theirs) and not theirs.count_not_in(notes):
                return True
    return False
