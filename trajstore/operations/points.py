"""Reports on saved points and other snapshots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from trajstore._core.buffer.points import incomplete_sentence, united
from trajstore._core.reading.places import Place, absent_above, is_of_rank, rank_of, ranks_above
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.saved_points import SavedPoint
from trajstore.errors import StoreError

logger = logging.getLogger(__name__)


def run_points_report(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved points of a run by step, with the ranks that lack each."""
    points = {}
    for part in parts:
        name = part["path"].rstrip("/").rsplit("/", 1)[-1]
        if is_of_rank(name) and part["kind"] == "store":
            points[int(name.removeprefix("rank_"))] = [SavedPoint(**point) for point in part["saved_points"]]
    return [
        {"step": point.step, "ranks": point.ranks, "lacking": list(point.lacking), "trajectories": point.trajectories}
        for point in united(points)
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
                points[rank_of(part.directory)] = [SavedPoint.of(head) for head in catalog.points()]
    known = [
        replace(point, lacking=tuple(rank for rank in point.lacking if rank not in unread)) for point in united(points)
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
