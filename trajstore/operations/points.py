"""Snapshots of stores: what ``inspect`` says of them, and going to one without a buffer."""

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
from trajstore.core.store.rollback import has_a_name, plan_change
from trajstore.core.store.saved_points import SavedPoint
from trajstore.core.writing.unattended import held_points
from trajstore.errors import ConfigurationError, StoreError, StoreNotFoundError


@dataclass(frozen=True)
class WentTo:
    """What going to a snapshot changed in one directory, or would change.

    Attributes:
        path: of the store, or of the folder of a run.
        to: the snapshot, as it was asked for.
        trajectories: live afterwards.
        leaving: trajectories that are no longer live.
        leaving_bytes: of their columns.
        returning: trajectories that are live again.
        values: late values that do not count any more.
        values_back: late values that count again.
        later_steps: of the saved points that are not on the line of the snapshot.
        aside: name of the head that is left; None if it has a name already, or is deleted.
        parts: of a run, one for each store.
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
        """Return it as JSON values."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("parts", "later_steps")
        }
        parts = {"parts": [part.to_json() for part in self.parts]} if self.parts else {}
        return {**values, "later_steps": list(self.later_steps), **parts}


_COUNTS = ("trajectories", "leaving", "leaving_bytes", "returning", "values", "values_back")


def go_to(path: str | Path, name: str | int, *, aside: bool = True, dry_run: bool = False) -> WentTo:
    """Go to a snapshot in a store, or in all stores of a run, which must all have it.

    Args:
        path: path or URL.
        name: of the snapshot; or step of a saved point of the current line.
        aside: keep the head that is left under a name; False deletes it.
        dry_run: change nothing.

    Raises:
        StoreNotFoundError: there is no store, or one of them has no such snapshot; nothing was changed.
        ConfigurationError: it is no store of trajstore.
        StoreLockedError: a writer has it open.
        CorruptStoreError: a store or its snapshot is damaged.
        StoreWriteError: it could not be written.
    """
    place = find_place(path)
    stores = stores_of(place)
    plans = [_planned(one, name, aside, len(stores)) for one in stores]  # first: a run goes as a whole or not at all
    if not dry_run:
        for one in stores:
            with held_points(one.directory) as points:
                points.go_to(name, aside=aside)
    if len(plans) == 1 and place.kind == "store":
        return plans[0]
    totals = {count: sum(getattr(plan, count) for plan in plans) for count in _COUNTS}
    return WentTo(place.url, name, parts=plans, **totals)


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


def _planned(place: Place, name: str | int, aside: bool, stores: int) -> WentTo:
    catalog = Catalog.open(place.directory)
    head = catalog.snapshot(name)
    change = plan_change(catalog, head)
    if (head.ranks or 0) > stores > 1:
        raise StoreNotFoundError(
            f"{place.url}: the point of step {head.step} was saved by {head.ranks} ranks, and {stores} are here"
        )
    named = not aside or change.is_empty or has_a_name(catalog, change.line)
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
        None if named else aside_name(catalog.generation + 1),
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
    """Return what ``inspect`` says of a store's saved points, of heads that were left, of other points and of pins."""
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
