"""Plans going to a snapshot: what it changes, and whether the present state gets a name. Pure; no I/O."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trajstore._core.store.catalog import Catalog
from trajstore._core.store.log_records import id_ranges
from trajstore._core.store.notes import Notes
from trajstore._core.store.saved_points import Snapshot, aside_name
from trajstore.errors import CorruptStoreError, trajectories


@dataclass(frozen=True, slots=True)
class SnapshotChanges:
    """The changes that going to a snapshot makes in one store.

    Attributes:
        path: path of the store.
        to: the requested snapshot.
        trajectories: number of live trajectories afterwards.
        leaving: number of trajectories that are no longer live.
        leaving_bytes: bytes of their columns.
        returning: number of trajectories that are live again.
        values: number of late values that no longer count.
        values_back: number of late values that count again.
        later_steps: steps of the saved points that are not on the snapshot's line.
        aside: name given to the head that is left; None if it has a name already or is deleted.
        left: name of the head that is left, ``aside`` or the one that it has already; None if nothing changes, or it is
            deleted.
    """

    path: str
    to: str | int
    trajectories: int
    leaving: int
    leaving_bytes: int
    returning: int
    values: int
    values_back: int
    later_steps: tuple[int, ...]
    aside: str | None
    left: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the changes as JSON values."""
        return {**asdict(self), "later_steps": list(self.later_steps)}


@dataclass(frozen=True, slots=True)
class Plan:
    """Going to a snapshot.

    Attributes:
        to: the snapshot.
        notes: its late values.
        line: names of the existing saved points on its line.
        changes: what it changes.
        is_empty: whether the store already equals the snapshot.
    """

    to: Snapshot
    notes: Notes
    line: tuple[str, ...]
    changes: SnapshotChanges
    is_empty: bool


def plan_change(catalog: Catalog, name: str | int, aside: bool, commits: int = 0) -> Plan:
    """Return what going to a snapshot of a store changes.

    Args:
        catalog: of the store.
        name: of the snapshot, or step of a saved point on the current line.
        aside: whether the present head is kept under a name.
        commits: number of commits that a writer makes before it goes to the snapshot.

    Raises:
        StoreNotFoundError: there is no such snapshot; names the existing ones.
        CorruptStoreError: the snapshot is damaged, or the store lacks trajectories or values of it.
    """
    to = catalog.snapshot(name)
    notes = catalog.values_of(to)
    staying, returning = catalog.index.positions_in(to.ids), len(catalog.pinned.positions_in(to.ids))
    if len(staying) + returning != to.count:
        raise CorruptStoreError(
            f"{catalog.directory.url}: the snapshot {to.name} names {trajectories(to.count)}, of which "
            f"{to.count - len(staying) - returning:,} cannot be found; go to another one"
        )
    leaves = np.ones(len(catalog.index), np.bool_)
    leaves[staying - catalog.index.first] = False
    present, line = catalog.points(), catalog.present_line(to)
    mine = catalog.notes.kept(catalog.index["trajectory_id"])
    leaving, values, values_back = int(leaves.sum()), mine.count_not_in(notes), notes.count_not_in(mine)
    is_empty = not (leaving or returning or values or values_back) and tuple(head.name for head in present) == line
    kept = aside and not is_empty
    name_before = _name_of_head(catalog, mine, line) if kept else None
    new_name = aside_name(catalog.generation + commits + 1) if kept and name_before is None else None
    changes = SnapshotChanges(
        catalog.directory.url,
        name,
        to.count,
        leaving,
        int(catalog.index["nbytes"][leaves].sum()),
        returning,
        values,
        values_back,
        tuple(head.step or 0 for head in present if head.name not in line),
        new_name,
        name_before or new_name,
    )
    return Plan(to, notes, line, changes, is_empty)


def _name_of_head(catalog: Catalog, notes: Notes, reachable: tuple[str, ...]) -> str | None:
    """Return the name of a head that was left, or of one of some saved points, that equals the head.

    Args:
        catalog: of the store.
        notes: late values of the live trajectories.
        reachable: names of the saved points to compare with.
    """
    ranges, line = id_ranges(catalog.index["trajectory_id"]), tuple(head.name for head in catalog.points())
    for head in catalog.snapshots():
        if head.kind == "pin" or (head.kind == "point" and head.name not in reachable):
            continue
        if np.array_equal(head.ids, ranges) and catalog.present_line(head) == line:
            theirs = catalog.values_of(head)
            if not notes.count_not_in(theirs) and not theirs.count_not_in(notes):
                return head.name
    return None
