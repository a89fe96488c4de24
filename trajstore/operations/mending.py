"""Mending stores that nobody writes: trajectories of which a condition holds leave, dead rows leave."""

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
    """What left a store or a run, or would leave it.

    Attributes:
        path: of the store, or of the run.
        trajectories: how many leave.
        nbytes: of their columns. Files go when no pin and no reader needs them.
        kept: how many stay.
        damage: of the store, by which trajectories were left as they are; None for none.
    """

    path: str
    trajectories: int
    nbytes: int
    kept: int
    damage: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        names = {"path": self.path, "trajectories": self.trajectories, "bytes": self.nbytes, "kept": self.kept}
        return {**names, "damage": self.damage}


@dataclass(frozen=True)
class Compacted:
    """What compacting changed.

    Attributes:
        path: of the store, or of the run.
        bytes_before: of the shards that the store and its pins needed.
        bytes_after: of those that they need now.
        held_bytes: of files that stay only until readers let go of them.
    """

    path: str
    bytes_before: int
    bytes_after: int
    held_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def prune(path: str | Path, where: str, *, dry_run: bool = False) -> Pruned:
    """Evict the trajectories of which a condition holds: of a store in one commit, of a run in one for each store.

    Where that was cut short, calling it again evicts the rest. What pins name stays readable until ``points.remove``.

    Args:
        path: path or URL of a store or a run.
        where: of facts, as ``query().where`` takes it. Of what is null it does not hold.
        dry_run: change nothing; a writer may be at work.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: it is no store of trajstore, or the condition is wrong; says where.
        MissingDependencyError: Polars is not installed (extra ``query``).
        StoreLockedError: somebody writes there; nothing was changed.
        CorruptStoreError: a store is damaged.
        StoreWriteError: it could not be written.
    """
    place = find_place(path)
    stores = stores_of(place)
    with ExitStack() as held:
        writers = {}
        for one in () if dry_run else stores:  # all, before any is changed
            rank = rank_number(one.directory, place.directory) if place.kind == "run" else ALONE
            writers[rank] = held.enter_context(_written(one))
        reader, damage = open_readable(path)
        with reader:
            leaving = reader.query().where(where)
            ids, nbytes, total = leaving.ids(), int(leaving.table()["bytes"].sum()), len(reader)
        for rank, writer in writers.items():
            writer.evict(own_id(ids[rank_of_id(ids) == rank]).tolist())
    return Pruned(place.url, len(ids), nbytes, total - len(ids), damage)


def compact(path: str | Path) -> Compacted:
    """Rewrite the shards of a store, or of each store of a run, until no row is dead and no two small ones are left.

    Where that was cut short, calling it again does the rest.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: it is no store of trajstore.
        StoreLockedError: somebody writes there, who may call ``buffer.compact()``.
        CorruptStoreError: a store is damaged.
        StoreWriteError: it could not be written.
    """
    place = find_place(path)
    before = after = held = 0.0
    for one in stores_of(place):
        with _written(one) as writer:
            before += writer.get_stats()["shard_bytes"]
            writer.compact()
            stats = writer.get_stats()
            after, held = after + stats["shard_bytes"], held + stats["held_bytes"]
    return Compacted(place.url, int(before), int(after), int(held))


@contextmanager
def _written(place: Place) -> Iterator[TrajectoryReplayBuffer]:
    """Yield a buffer that writes to a store, and leaves its seed and format as they are."""
    reader, _ = open_readable(place.url)
    with reader:
        seed, trajectory_format = reader.seed, reader.trajectory_format
    with TrajectoryReplayBuffer(
        seed, auto_save=True, auto_save_path=place.url, trajectory_format=trajectory_format
    ) as writer:
        yield writer
