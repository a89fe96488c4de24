"""Saved points of stores: what ``inspect`` says of them, and going back to one without a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trajstore.core.buffer.runs import incomplete_sentence, unite_points
from trajstore.core.reading.places import Place, absent_above, find_place, is_of_rank, rank_of, ranks_above
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.pin_names import aside_name
from trajstore.core.store.rollback import plan_rollback, set_aside
from trajstore.core.store.saved_points import SavedPoint
from trajstore.core.writing.unattended import held_points
from trajstore.errors import ConfigurationError, StoreError, StoreNotFoundError


@dataclass(frozen=True)
class RolledBack:
    """What a rollback of one directory changed, or would change.

    Attributes:
        path: of the store, or of the folder of a run.
        step: of the saved point.
        trajectories: live afterwards.
        leaving: trajectories that are no longer live.
        leaving_bytes: of their columns.
        returning: evicted trajectories that are live again.
        later_steps: of the saved points that are void.
        aside: name under which what leaves stays; None if nothing leaves, or it is deleted.
        parts: of a run, one for each store.
    """

    path: str
    step: int
    trajectories: int = 0
    leaving: int = 0
    leaving_bytes: int = 0
    returning: int = 0
    later_steps: tuple[int, ...] = ()
    aside: str | None = None
    parts: list[RolledBack] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("parts", "later_steps")
        }
        parts = {"parts": [part.to_json() for part in self.parts]} if self.parts else {}
        return {**values, "later_steps": list(self.later_steps), **parts}


def roll_back(path: str | Path, step: int, *, aside: bool = True, dry_run: bool = False) -> RolledBack:
    """Go back to the saved point of a step: a store, or all stores of a run, which must all have it.

    Args:
        path: path or URL.
        step: of the point.
        aside: keep what leaves readable; False deletes it.
        dry_run: change nothing.

    Raises:
        StoreNotFoundError: there is no store, or one of them has no such point; nothing was changed.
        ConfigurationError: it is no store of trajstore.
        StoreLockedError: somebody writes there.
        CorruptStoreError: a store or its point is damaged.
        StoreWriteError: it could not be written.
    """
    place = find_place(path)
    stores = stores_of(place)
    plans = [_planned(one, step, aside, len(stores)) for one in stores]  # first: a run goes back whole or not at all
    if not dry_run:
        for one in stores:
            with held_points(one.directory) as points:
                points.roll_back(step, aside=aside)
    if len(plans) == 1 and place.kind == "store":
        return plans[0]
    totals = {
        name: sum(getattr(plan, name) for plan in plans)
        for name in ("trajectories", "leaving", "leaving_bytes", "returning")
    }
    return RolledBack(place.url, step, parts=plans, **totals)


def take_back(path: str | Path, name: str, *, dry_run: bool = False) -> int:
    """Make live again what a rollback set aside; return how many trajectories.

    Args:
        path: path or URL of a store.
        name: ``"aside-..."``.
        dry_run: change nothing.

    Raises:
        StoreNotFoundError: there is no store, or nothing was set aside under this name.
        ConfigurationError: it is no store of trajstore.
        StoreLockedError: somebody writes there.
        StoreWriteError: it could not be written.
    """
    place = find_place(path)
    if place.kind != "store":
        why = "is a run; name one of its stores" if place.kind == "run" else "is no store of trajstore; name one store"
        raise ConfigurationError(f"{place.url}: {why}")
    if dry_run:
        catalog = Catalog.open(place.directory)
        return len(catalog.pinned.positions_in(set_aside(catalog, name).ids))
    with held_points(place.directory) as points:
        return points.take_back(name)


def stores_of(place: Place) -> list[Place]:
    """Return the stores at a place that is changed whole or not at all: it, or those of a run, none of which lacks.

    Raises:
        ConfigurationError: it is no store of trajstore, or a run of which a rank lacks or is none.
    """
    if place.kind == "store":
        return [place]
    stores = [part for part in place.parts if part.kind == "store"]
    if place.kind != "run" or len(stores) < len(place.parts) or place.lacking:
        others = [f"{part.name} is no store of trajstore" for part in place.parts if part.kind != "store"]
        why = "; ".join((*place.lacking, *others)) if place.kind == "run" else f"it is of the kind {place.kind!r}"
        raise ConfigurationError(
            f"{place.url}: is neither a store of trajstore nor a run whose ranks are all there: {why}"
        )
    return stores


def _planned(place: Place, step: int, aside: bool, stores: int) -> RolledBack:
    catalog = Catalog.open(place.directory)
    plan = plan_rollback(catalog, step)
    if (plan.point.ranks or 0) > stores > 1:
        raise StoreNotFoundError(
            f"{place.url}: the point of step {step} was saved by {plan.point.ranks} ranks, and {stores} are here"
        )
    leaves = bool(len(plan.leaving) or plan.void)
    return RolledBack(
        place.url,
        step,
        plan.point.count,
        len(plan.leaving),
        plan.nbytes,
        len(plan.returning),
        tuple(head.step or 0 for head in plan.void),
        aside_name(catalog.generation + 1) if aside and leaves else None,
    )


def run_points_report(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``inspect`` says of the saved points of a run: of each step, which ranks lack it."""
    points = {}
    for part in parts:
        name = part["path"].rstrip("/").rsplit("/", 1)[-1]
        if is_of_rank(name) and part["kind"] == "store":
            points[int(name.removeprefix("rank_"))] = [SavedPoint(**point) for point in part["saved_points"]]
    return [
        {"step": point.step, "ranks": point.ranks, "lacking": list(point.lacking), "trajectories": point.trajectories}
        for point in unite_points(points)
    ]


def incomplete_points(place: Place) -> list[str]:
    """Return a sentence on each saved point that some ranks of a run have and others do not.

    What a rank has whose store cannot be read is not known, so nothing is said of such ranks.
    """
    points = {}
    unread = set()
    for part in place.parts:
        if part.kind == "store" and is_of_rank(part.name):
            try:
                catalog = Catalog.open(part.directory)
            except (StoreError, OSError):  # told already
                unread.add(rank_of(part.directory))
            else:
                points[rank_of(part.directory)] = list(map(SavedPoint.of, catalog.points()))
    known = [
        replace(point, lacking=tuple(rank for rank in point.lacking if rank not in unread))
        for point in unite_points(points)
    ]
    return [incomplete_sentence(point) for point in known if not point.is_complete]


def absent_ranks(place: Place) -> list[str]:
    """Return a sentence on the highest ranks of a run that are absent, where saved points say how many there were."""
    return absent_above(place.rank_names, _said_of_ranks(place))


def numbers_absent(place: Place) -> range:
    """Return the numbers of the ranks of which :func:`absent_ranks` tells; its end is how many ranks there were."""
    return ranks_above(place.rank_names, _said_of_ranks(place))


def _said_of_ranks(place: Place) -> list[int | None]:
    said: list[int | None] = []
    for part in place.parts:
        if part.kind == "store" and is_of_rank(part.name):
            with suppress(StoreError, OSError):  # told already
                said += [head.ranks for head in Catalog.open(part.directory).points()[-1:]]
    return said


def points_report(catalog: Catalog) -> dict[str, Any]:
    """Return what ``inspect`` says of a store's saved points, of what rollbacks set aside, and of other pins."""
    pins, voided = catalog.pins, catalog.void_points()
    reports = []
    for head in sorted(catalog.asides(), key=lambda head: head.generation):
        entries = catalog.pinned.positions_in(head.ids)
        steps = {other.step for other in pins.heads.values() if other.aside == head.name}
        steps |= {pins.heads[name].step for name, by in voided.items() if by == head.generation}
        reports.append(
            {
                "name": head.name,
                "rolled_back_to": head.back_to,
                "trajectories": len(entries),
                "bytes": int(catalog.pinned.at("nbytes", entries).sum()),
                "steps": sorted(step for step in steps if step is not None),
                "deleted": head.deleted,
            }
        )
    return {
        "saved_points": [asdict(SavedPoint.of(head)) for head in catalog.points()],
        "aside": reports,
        "pins": [head.name for head in pins.heads.values() if head.step is None and head.back_to is None],
    }
