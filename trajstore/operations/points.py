"""Reports on saved points and other snapshots, and rollback without a buffer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trajstore._core.buffer.runs import incomplete_sentence, unite_points
from trajstore._core.buffer.saved_points import KEEP_CALLS
from trajstore._core.reading.places import Place, absent_above, find_place, is_of_rank, rank_of, ranks_above
from trajstore._core.sessions.sessions import warn_of_open
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.pin_names import aside_name
from trajstore._core.store.rollback import has_a_name, plan_change
from trajstore._core.store.saved_points import SavedPoint
from trajstore._core.writing.inbox import Pending
from trajstore._core.writing.unattended import held_points
from trajstore.errors import ConfigurationError, StoreError, StoreNotFoundError, counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WentTo:
    """The changes, or planned changes, of a rollback in one directory.

    Attributes:
        path: path of the store, or of the folder of a run.
        to: the requested snapshot.
        trajectories: number of live trajectories afterwards.
        leaving: number of trajectories that are no longer live.
        leaving_bytes: bytes of their columns.
        returning: number of trajectories that are live again.
        values: number of late values that no longer count.
        values_back: number of late values that count again.
        later_steps: steps of the saved points that are not on the snapshot's line.
        aside: name given to the head that is left; None if it has a name already or is deleted.
        parts: one result per store of a run.
    """

    path: str
    to: str | int
    trajectories: int = 0
    leaving: int = 0
    leaving_bytes: int = 0
    returning: int = 0
    values: int = 0
    values_back: int = 0
    later_steps: tuple[int, ...] = ()
    aside: str | None = None
    parts: list[WentTo] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("parts", "later_steps")
        }
        parts = {"parts": [part.to_json() for part in self.parts]} if self.parts else {}
        return {**values, "later_steps": list(self.later_steps), **parts}


_COUNTS = ("trajectories", "leaving", "leaving_bytes", "returning", "values", "values_back")


def go_to(path: str | Path, name: str | int, *, aside: bool = True, dry_run: bool = False) -> WentTo:
    """Roll a store back to a snapshot, or all stores of a run, each of which must have it.

    Args:
        path: path or URL.
        name: name of the snapshot, or step of a saved point on the current line.
        aside: keep the present head under a name; False deletes it.
        dry_run: change nothing.

    Raises:
        StoreNotFoundError: there is no store, or a store lacks the snapshot; nothing was changed.
        ConfigurationError: the path is not a store of trajstore.
        StoreLockedError: a writer has the store open.
        CorruptStoreError: a store or its snapshot is damaged.
        StoreWriteError: the store cannot be written.
    """
    place = find_place(path)
    stores = _stores_at_point(stores_of(place), name)
    plans = [_planned(store, name, aside, len(stores)) for store in stores]  # checks all stores before any change
    if not dry_run:
        for number, store in enumerate(stores):
            with held_points(store.directory) as points:
                plans[number] = replace(plans[number], aside=points.go_to(name, aside=aside).aside)
            warn_of_open(store.url, KEEP_CALLS)
    if len(plans) == 1 and place.kind == "store":
        return plans[0]
    totals = {count: sum(getattr(plan, count) for plan in plans) for count in _COUNTS}
    return WentTo(place.url, name, parts=plans, **totals)


def stores_of(place: Place) -> list[Place]:
    """Return the store at a place, or all stores of a complete run.

    Raises:
        ConfigurationError: the place is not a store of trajstore, or is a run with an absent or foreign rank.
    """
    if place.kind == "store":
        return [place]
    stores = [part for part in place.parts if part.kind == "store"]
    if place.kind != "run" or len(stores) < len(place.parts) or place.lacking:
        others = [f"{part.name} is no store of trajstore" for part in place.parts if part.kind != "store"]
        why = "; ".join((*place.lacking, *others)) if place.kind == "run" else f"it is of the kind {place.kind!r}"
        raise ConfigurationError(f"{place.url}: is neither a store of trajstore nor a run with all its ranks: {why}")
    return stores


def _stores_at_point(stores: list[Place], name: str | int) -> list[Place]:
    """Return the stores of a run without empty ones above the number of ranks that a point records."""
    ranks = Catalog.open(stores[0].directory).snapshot(name).ranks
    if not ranks:
        return stores
    above = [store for store in stores if is_of_rank(store.name) and rank_of(store.directory) >= ranks]
    empty = [store for store in above if not len(Catalog.open(store.directory).index)]
    for store in empty:
        logger.warning("%s: is skipped: it is empty, and %s saved the point", store.url, counted(ranks, "rank"))
    return [store for store in stores if store not in empty]


def _planned(place: Place, name: str | int, aside: bool, stores: int) -> WentTo:
    pending = Pending(place.directory)
    catalog = Catalog.open(place.directory)
    added, *_ = pending.add_to(catalog)
    head = catalog.snapshot(name)
    change = plan_change(catalog, head)
    if (head.ranks or 0) > stores > 1:
        raise StoreNotFoundError(
            f"{place.url}: the point of step {head.step} was saved by {head.ranks} ranks, and {stores} are here"
        )
    named = not aside or change.is_empty or has_a_name(catalog, change.line)
    fences = 0 if place.directory.can_append else 1  # a writer of an object store begins with one
    return WentTo(
        place.url,
        name,
        head.count,
        len(change.leaving),
        change.nbytes,
        len(change.returning),
        change.values,
        change.values_back,
        tuple(point.step or 0 for point in change.points),
        None if named else aside_name(catalog.generation + added + fences + 1),
    )


def run_points_report(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved points of a run by step, with the ranks that lack each."""
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
    """Return a sentence on each saved point that some ranks of a run lack.

    Ranks with an unreadable store are not reported, because their points are unknown.
    """
    points = {}
    unread = set()
    for part in place.parts:
        if part.kind == "store" and is_of_rank(part.name):
            try:
                catalog = Catalog.open(part.directory)
            except (StoreError, OSError):  # reported already
                unread.add(rank_of(part.directory))
            else:
                points[rank_of(part.directory)] = list(map(SavedPoint.of, catalog.points()))
    known = [
        replace(point, lacking=tuple(rank for rank in point.lacking if rank not in unread))
        for point in unite_points(points)
    ]
    return [incomplete_sentence(point) for point in known if not point.is_complete]


def absent_ranks(place: Place) -> list[str]:
    """Return a sentence on each absent highest rank of a run, if saved points or shares record their number."""
    return absent_above(place.rank_names, _said_of_ranks(place))


def numbers_absent(place: Place) -> range:
    """Return the ranks reported by :func:`absent_ranks`; the range ends at the recorded number of ranks."""
    return ranks_above(place.rank_names, _said_of_ranks(place))


def _said_of_ranks(place: Place) -> list[int | None]:
    rank_counts: list[int | None] = []
    for part in place.parts:
        if part.kind == "store" and is_of_rank(part.name):
            with suppress(StoreError, OSError):  # reported already
                rank_counts.append(Catalog.open(part.directory).ranks)
    return rank_counts


def points_report(catalog: Catalog) -> dict[str, Any]:
    """Return a store's saved points, heads left by rollbacks, other points and pins, for ``inspect``."""
    on_line = {head.name for head in catalog.points()}
    reports = []
    for head in catalog.asides():
        entries = catalog.pinned.positions_in(head.ids)
        reports.append(
            {
                "name": head.name,
                "left_for": head.left_for,
                "trajectories": head.count,
                "bytes": int(catalog.pinned.at("nbytes", entries).sum()),
                "points": [name for name in catalog.present_line(head) if name not in on_line],
            }
        )
    others = [head.name for head in catalog.snapshots() if head.kind == "point" and head.name not in on_line]
    return {
        "saved_points": [asdict(SavedPoint.of(head)) for head in catalog.points()],
        "other_points": others,
        "aside": reports,
        "pins": [head.name for head in catalog.snapshots() if head.kind == "pin"],
    }
