"""Rollback: which trajectories leave, which come back, and what the catalog is then. Pure; no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.core.store.catalog import Catalog
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.saved_points import PinHead
from trajstore.errors import CorruptStoreError, StoreNotFoundError


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """What a rollback changes.

    Attributes:
        point: to which it goes.
        leaving: ids of trajectories that are live and not of the point, ascending.
        returning: ids of trajectories of the point that were evicted since, ascending.
        void: saved points of later steps.
        nbytes: of the trajectories that leave.
        notes: values that came late, after the point, and are taken back.
    """

    point: PinHead
    leaving: npt.NDArray[np.int64]
    returning: npt.NDArray[np.int64]
    void: tuple[PinHead, ...]
    nbytes: int
    notes: int

    @property
    def is_empty(self) -> bool:
        """Whether the store is at the point already."""
        return not (len(self.leaving) or len(self.returning) or self.void or self.notes)


def plan_rollback(catalog: Catalog, step: int) -> RollbackPlan:
    """Return what a rollback to the saved point of a step would change.

    Raises:
        StoreNotFoundError: there is no such point; names those that there are.
        CorruptStoreError: the store lacks trajectories that the point names.
    """
    point = catalog.point(step)
    stays = catalog.index.positions_in(point.ids)
    back = catalog.pinned.positions_in(point.ids)
    if len(stays) + len(back) != point.count:
        raise CorruptStoreError(
            f"{catalog.directory.url}: the saved point of step {step} names {point.count} trajectories, of which "
            f"{point.count - len(stays) - len(back)} are not in the store; roll back to another point"
        )
    leaves = np.ones(len(catalog.index), np.bool_)
    leaves[stays - catalog.index.first] = False
    later = [head for head in catalog.points() if (head.step or 0) > step]
    return RollbackPlan(
        point,
        np.sort(catalog.index["trajectory_id"][leaves]),
        np.sort(catalog.pinned.at("trajectory_id", back)),
        tuple(later),
        int(catalog.index["nbytes"][leaves].sum()),
        catalog.notes.count_since(point.generation),
    )


def set_aside(catalog: Catalog, name: str) -> PinHead:
    """Return what a rollback set aside under a name.

    Raises:
        StoreNotFoundError: there is nothing of this name; names what there is.
    """
    asides = {head.name: head for head in catalog.asides() if not head.deleted}
    if name not in asides:
        there = ", ".join(asides) or "none"
        raise StoreNotFoundError(f"{catalog.directory.url}: nothing was set aside as {name!r}; there are: {there}")
    return asides[name]


def with_live(catalog: Catalog, ranges: npt.NDArray[np.int64]) -> tuple[TrajectoryIndex, TrajectoryIndex]:
    """Return index and pinned entries of a catalog in which the trajectories in these ranges alone are live.

    Args:
        catalog: stays as it is.
        ranges: inclusive ranges of ids ``[n, 2]``; they may overlap.
    """
    live, pinned = TrajectoryIndex(), TrajectoryIndex()
    live.texts, pinned.texts = catalog.index.texts.copy(), catalog.pinned.texts.copy()
    for source in (catalog.index, catalog.pinned):
        inside = np.zeros(source.end, np.bool_)
        inside[source.positions_in(ranges)] = True
        outside = ~inside
        outside[: source.first] = False
        outside[source.first :] &= catalog.pins.named(source["trajectory_id"])
        for target, chosen, home in ((live, inside, catalog.index), (pinned, outside, catalog.pinned)):
            columns = source.take(np.flatnonzero(chosen))
            target.append(columns if source is home else target.translated(columns, source.texts))
    live.replace(live.take(np.argsort(live["trajectory_id"], kind="stable")))
    return live, pinned
