"""Prune or compact stores that have no writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.core.reading.places import Place, find_place, rank_number
from trajstore.core.store.run_ids import ALONE, own_id, rank_of_id
from trajstore.operations.opening import open_readable
from trajstore.operations.points import stores_of


@dataclass(frozen=True)
class Pruned:
    """The result of pruning a store or a run, or of a dry run.

    Attributes:
        path: path of the store or run.
        trajectories: number of trajectories evicted.
        nbytes: bytes of their columns. Files are deleted once no pin and no reader needs them.
        kept: number of trajectories kept.
        damage: damage of the store that leaves some trajectories unexamined; None if there is none.
    """

    path: str
    trajectories: int
    nbytes: int
    kept: int
    damage: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        names = {"path": self.path, "trajectories": self.trajectories, "bytes": self.nbytes, "kept": self.kept}
        return {**names, "damage": self.damage}


@dataclass(frozen=True)
class Compacted:
    """The result of compacting a store or a run.

    Attributes:
        path: path of the store or run.
        bytes_before: bytes of the shards needed by the store and its pins before.
        bytes_after: bytes of the shards needed now.
        held_bytes: bytes of files kept only until readers release them.
        damaged: number of damaged shards, which stay as they are.
    """

    path: str
    bytes_before: int
    bytes_after: int
    held_bytes: int
    damaged: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


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
    stores = stores_of(place)
    with ExitStack() as held:
        writers = {}
        for store in () if dry_run else stores:  # lock all before changing any
            rank = rank_number(store.directory, place.directory) if place.kind == "run" else ALONE
            writers[rank] = held.enter_context(_written(store))
        reader, damage = open_readable(path)
        with reader:
            leaving = reader.query().where(where)
            ids, nbytes, total = leaving.ids(), int(leaving.table()["bytes"].sum()), len(reader)
        for rank, writer in writers.items():
            writer.evict(own_id(ids[rank_of_id(ids) == rank]).tolist())
    return Pruned(place.url, len(ids), nbytes, total - len(ids), damage)


def compact(path: str | Path) -> Compacted:
    """Rewrite the shards of a store, or of each store of a run, to remove dead rows and merge small shards.

    After an interruption, call it again to do the rest.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: the path is not a store of trajstore.
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
            damaged += writer.sink.compact()
            stats = writer.get_stats()
            after, held = after + stats["shard_bytes"], held + stats["held_bytes"]
    return Compacted(place.url, int(before), int(after), int(held), damaged)


@contextmanager
def _written(place: Place) -> Iterator[TrajectoryReplayBuffer]:
    """Yield a buffer that writes to a store and keeps its seed and format."""
    reader, _ = open_readable(place.url)
    with reader:
        seed, trajectory_format = reader.seed, reader.trajectory_format
    with TrajectoryReplayBuffer(
        seed, auto_save=True, auto_save_path=place.url, trajectory_format=trajectory_format
    ) as writer:
        yield writer
