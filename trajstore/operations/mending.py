"""Prune or compact stores that have no writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trajstore._core.base.types import IntArray
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.buffer.saved_points import stores_of
from trajstore._core.reading.places import Place, find_place, rank_number
from trajstore._core.reading.sources import StoreSource
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import ALONE, own_id, rank_of_id
from trajstore._core.store.salvage import open_leniently
from trajstore._core.store.saved_points import by_number
from trajstore.errors import StoreWriteError, listed, trajectories
from trajstore.operations.opening import open_readable
from trajstore.operations.points import kept_on_disk


@dataclass(frozen=True)
class Pruned:
    """The result of pruning a store or a run, or of a dry run.

    Attributes:
        path: path of the store or run.
        trajectories: number of trajectories evicted.
        nbytes: bytes of their columns. Files are deleted once no pin and no reader needs them.
        kept: number of trajectories kept.
        damage: damage of the store that leaves some trajectories unexamined; None if there is none.
        held_by_points: of the evicted ones that snapshots (saved points, left heads, pins) keep on disk: the number of
            ``trajectories``, the ``bytes`` of their columns, and the ``names`` of the snapshots.
        dry_run: nothing was changed.
    """

    path: str
    trajectories: int
    nbytes: int
    kept: int
    damage: str | None
    held_by_points: dict[str, Any]
    dry_run: bool


@dataclass(frozen=True)
class Compacted:
    """The result of compacting a store or a run.

    Attributes:
        path: path of the store or run.
        bytes_before: bytes of the shards needed by the store and its pins before.
        bytes_after: bytes of the shards needed now.
        held_bytes: bytes of files kept only until readers release them.
        damaged: number of damaged shards, which stay as they are.
        held_by_points: evicted trajectories that snapshots keep, as in :class:`Pruned`.
    """

    path: str
    bytes_before: int
    bytes_after: int
    held_bytes: int
    damaged: int
    held_by_points: dict[str, Any]


def prune(path: str | Path, where: str, *, dry_run: bool = False) -> Pruned:
    """Evict the trajectories that match a condition, in one commit per store.

    After an interruption, call it again to evict the rest. Pinned trajectories stay readable until ``points.remove``.

    Args:
        path: path or URL of a store or a run.
        where: condition on facts, as for ``query().where``. A null fact never matches.
        dry_run: change nothing; allowed while a writer is active.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: the path is not a store of trajstore, or the condition is invalid (with the position).
        MissingDependencyError: Polars is not installed (extra ``query``).
        StoreLockedError: a writer is active; nothing was changed.
        CorruptStoreError: a store is damaged.
        StoreWriteError: the store cannot be written.
    """
    place = find_place(path)
    stores, done = stores_of(place), ""
    try:
        with ExitStack() as held:
            writers = {}
            ranks = {
                store.url: rank_number(store.directory, place.directory) if place.parts else ALONE for store in stores
            }
            for store in () if dry_run else stores:  # lock all before changing any
                writers[ranks[store.url]] = held.enter_context(_written(store))
            reader, damage = open_readable(path)
            with reader:
                leaving, total = reader.query().where(where).table(), len(reader)
                ids, nbytes = leaving["trajectory_id"].to_numpy(), int(leaving["bytes"].sum())
                sources = [source for source in reader._live.contents.sources if isinstance(source, StoreSource)]
                gone = {
                    (rank := ranks[source.directory.url]): np.append(
                        own_id(ids[rank_of_id(ids) == rank]), source.twins[np.isin(source.twins[:, 1], ids), 0]
                    )
                    for source in sources
                }
                by_points = _held_by_points(
                    (open_leniently(source.directory)[0], gone[ranks[source.directory.url]]) for source in sources
                )
            evicted, held_by = 0, f", kept on disk by {listed(by_points['names'])}" if by_points["names"] else ""
            for rank, writer in writers.items():
                writer.evict(gone.get(rank, ids[:0]))
                evicted += int((rank_of_id(ids) == rank).sum())
                rest = f", of {len(ids):,}; prune again to evict the rest" if evicted < len(ids) else ""
                done = f"{trajectories(evicted, 'was', 'were')} evicted{held_by}{rest}"
    except StoreWriteError as error:
        if not done:
            raise
        raise StoreWriteError(f"{error}; before that, {done}") from error
    return Pruned(place.url, len(ids), nbytes, total - len(ids), damage, by_points, dry_run)


def compact(path: str | Path, *, compress: bool = False) -> Compacted:
    """Rewrite the shards of a store, or of each store of a run, to remove dead rows and merge small shards.

    After an interruption, call it again to do the rest.

    Args:
        path: path or URL of a store or a run.
        compress: compress all shards, see :meth:`TrajectoryReplayBuffer.compact`.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: the path is not a store of trajstore.
        MissingDependencyError: ``compress`` without the extra ``zarr``.
        StoreLockedError: a writer is active; it can call ``buffer.compact()`` itself.
        CorruptStoreError: a store is damaged.
        StoreWriteError: the store cannot be written.
    """
    place = find_place(path)
    before = after = held = 0.0
    damaged = 0
    for store in stores_of(place):
        with _written(store) as writer:
            before += writer.get_stats()["shard_bytes"]
            damaged += writer._sink.compact(compress=compress)
            stats = writer.get_stats()
            after, held = after + stats["shard_bytes"], held + stats["held_bytes"]
    by_points = _held_by_points((Catalog.open(store.directory), None) for store in stores_of(place))
    return Compacted(place.url, int(before), int(after), int(held), damaged, by_points)


def _held_by_points(stores: Iterable[tuple[Catalog, IntArray | None]]) -> dict[str, Any]:
    """Return which trajectories snapshots keep, see :class:`Pruned`: of live ones these ids, or all evicted ones."""
    groups = []
    for catalog, ids in stores:
        index = catalog.pinned if ids is None else catalog.index
        chosen = slice(None) if ids is None else np.isin(index["trajectory_id"], ids)
        groups += kept_on_disk(catalog, index, chosen)
    sums = {name: sum(group[name] for group in groups) for name in ("trajectories", "bytes")}
    return sums | {"names": sorted({name for group in groups for name in group["names"]}, key=by_number)}


@contextmanager
def _written(place: Place) -> Iterator[TrajectoryReplayBuffer]:
    """Yield a buffer that writes to a store and keeps its seed and format."""
    reader, _ = open_readable(place.url)
    with reader:
        seed, trajectory_format = reader.seed, reader._trajectory_format
    with TrajectoryReplayBuffer(
        seed, auto_save=True, auto_save_path=place.url, trajectory_format=trajectory_format
    ) as writer:
        yield writer
