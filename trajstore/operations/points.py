"""Reports on saved points and other snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.buffer.points import incomplete_sentence, united
from trajstore._core.reading.places import Place, absent_above, is_of_rank, rank_of, ranks_above
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import lie_in
from trajstore._core.store.saved_points import SavedPoint
from trajstore.errors import StoreError


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
    for rank, catalog in _catalogs(place):
        if catalog is None:
            unread.add(rank)
        else:
            points[rank] = [SavedPoint.of(head) for head in catalog.points()]
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
    return [catalog.ranks for _, catalog in _catalogs(place) if catalog is not None]


def _catalogs(place: Place) -> Iterator[tuple[int, Catalog | None]]:
    """Yield the ranks of a run with their catalogs; None for an unreadable one, which is reported elsewhere."""
    for part in place.parts:
        if part.kind == "store" and is_of_rank(part.name):
            catalog = None
            with suppress(StoreError, OSError):
                catalog = Catalog.open(part.directory)
            yield rank_of(part.directory), catalog


def points_report(catalog: Catalog) -> dict[str, Any]:
    """Return a store's saved points, heads left by rollbacks, other points and pins, for ``inspect``."""
    on_line = {head.name for head in catalog.points()}
    reports = []
    for head in catalog.asides():
        points = [name for name in catalog.present_line(head) if name not in on_line]
        reports.append({"name": head.name, "left_for": head.left_for, "trajectories": head.count, "points": points})
    others = [head.name for head in catalog.snapshots() if head.kind == "point" and head.name not in on_line]
    return {
        "saved_points": [asdict(SavedPoint.of(head)) for head in catalog.points()],
        "other_points": others,
        "aside": reports,
        "pins": [head.name for head in catalog.snapshots() if head.kind == "pin"],
        "kept_on_disk": kept_on_disk(catalog, catalog.pinned),
    }


def kept_on_disk(
    catalog: Catalog, index: TrajectoryIndex, chosen: slice | npt.NDArray[np.bool_] = slice(None)
) -> list[dict[str, Any]]:
    """Return those of these trajectories that snapshots keep, grouped by the snapshots that must all be removed.

    Args:
        catalog: of a store.
        index: evicted trajectories, or those to be evicted.
        chosen: which of these.

    Returns:
        For each group ``names`` of the snapshots, ``trajectories`` (their number) and ``bytes``, their part of the
        shards' files.
    """
    heads = catalog.snapshots()
    if not heads:
        return []
    ids, shards = index["trajectory_id"][chosen], index["shard"][chosen]
    in_files = catalog.shards.nbytes() / np.maximum(catalog.shards.row_bytes(), 1)
    nbytes = index["nbytes"][chosen] * np.append(in_files, 0.0)[shards]  # the last is of lost shards, -1
    sets, group = np.unique(np.stack([lie_in(ids, head.ids) for head in heads], axis=1), axis=0, return_inverse=True)
    rows = []
    for number, named in enumerate(sets):
        inside = nbytes[group.ravel() == number]
        names = [head.name for head, is_named in zip(heads, named, strict=True) if is_named]
        rows += [{"names": names, "trajectories": len(inside), "bytes": int(inside.sum())}] if names else []
    return sorted(rows, key=lambda row: row["bytes"], reverse=True)
