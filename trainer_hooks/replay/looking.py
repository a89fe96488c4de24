"""Read-only views of a pool, in a store that its run is still writing or in files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_hooks.replay.buckets import DifficultyBuckets
from trainer_hooks.replay.entry import PoolEntry, Refusal, entry_of, token_digest
from trainer_hooks.replay.facts import with_pool_facts
from trainer_hooks.replay.late_values import with_training
from trainer_hooks.replay.persistence import read_pool
from trainer_hooks.replay.state import PoolState, recover
from trainer_hooks.replay.store import PoolPoint, newest_point
from trajstore._core.buffer.reader import Reader
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.base import Directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import id_from
from trajstore._core.store.saved_points import PINS_FOLDER
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError, TrajectoryUnavailableError, listed, trajectories
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from polars import DataFrame

    from trajstore.query import Query


@dataclass(frozen=True, slots=True, eq=False)
class SeenPool:
    """A pool's contents at one moment.

    Attributes:
        buffer: has its trajectories, perhaps among others.
        state: of the pool.
        difficulties: tasks per difficulty by step, as far back as known.
        of_files: whether it was read from files, which lack the number of draws and the time of entry.
        among_others: whether the store has all rollouts of the trainer, which are shown too.
    """

    buffer: Reader
    state: PoolState
    difficulties: Mapping[int, Mapping[int, int]]
    of_files: bool = False
    among_others: bool = False

    def __len__(self) -> int:
        return len(self.buffer) if self.among_others else self.state.count()

    def overview(self) -> dict[str, Any]:
        """Return figures of the pool: tasks per difficulty now and by step, demonstrations, skipped tasks."""
        buckets = self.state.buckets.sizes()
        steps = sorted(self.difficulties)
        known = sorted({*buckets, *(key for sizes in self.difficulties.values() for key in sizes)})
        return {
            "histories": self.state.count(),
            "tasks": len(self.state.entries),
            "demonstrations": self.state.demonstrations(),
            "skipped": len(self.state.skip),
            "difficulties": [[key, buckets.get(key, 0)] for key in known],
            "steps": steps,
            "by_step": [[self.difficulties[step].get(key, 0) for step in steps] for key in known],
        }

    def query(self) -> Query:
        """Return a query over the trajectories; see :meth:`ExperienceManager.query`."""
        whole = self.buffer.query()
        return replace(whole, facts=lambda: self._told(whole.facts()))

    def _told(self, facts: DataFrame) -> DataFrame:
        with_facts = with_pool_facts(facts, self.state, every=self.among_others)
        unknown = ("uses", "committed") if self.of_files else ()
        return with_facts.with_columns(with_facts[name].clear(len(with_facts)) for name in unknown)

    def get(self, shown: str) -> AgentTrajectory:
        """Return a trajectory by its id.

        Raises:
            TrajectoryUnavailableError: the pool has no such id.
            CorruptStoreError: it is damaged.
        """
        number = id_from("trajectory_id", shown)
        chosen = (entry.trajectory_id for entry in self.state.all_entries())
        if not self.among_others and number not in chosen:
            raise TrajectoryUnavailableError(f"trajectory {shown}: not in the pool, or no longer")
        record = self.buffer.get(number)
        if not isinstance(record, AgentTrajectory):
            raise CorruptStoreError(f"trajectory {shown}: a step trajectory, which a pool cannot hold")
        return record


class Records:
    """The trajectories of a pool's store, each read once, and its newest saved point.

    Args:
        reader: shows the store.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._known: dict[int, AgentTrajectory] = {}
        """Trajectories without messages and tokens."""
        self._entries: dict[int, PoolEntry | Refusal] = {}
        self._files: list[str] = []

    def look(self) -> SeenPool:
        """Return the pool as the reader shows it now.

        Raises:
            CorruptStoreError: its point cannot be decoded.
        """
        self._files = self._point_files()
        recovered = recover(self, lambda _, number: self._entries[number])
        kept = self.kept(self._known)
        self._known = {number: record for number, record in self._known.items() if number in kept}
        self._entries = {number: entry for number, entry in self._entries.items() if number in kept}
        state = recovered.state
        return SeenPool(self._reader, state, state.difficulties, among_others=recovered.among_others)

    def is_current(self) -> bool:
        """Return whether no point was saved since :meth:`look`."""
        return self._files == self._point_files()

    def newest_point(self) -> PoolPoint | None:
        request = self._reader._live.request
        return newest_point(Catalog.open(self._directory()), None if request is None else request.pin)

    def _directory(self) -> Directory:
        (catalog,) = self._reader._live.catalogs_by_rank().values()
        return catalog.directory

    def _point_files(self) -> list[str]:
        """Return the files of all snapshots; the names of states change with every point."""
        return sorted(self._directory().listing(PINS_FOLDER)[0])

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        known = self._known.get(trajectory_id)
        if known is not None:
            return known
        stored = self._reader.get(trajectory_id)
        if not isinstance(stored, AgentTrajectory):
            raise InvalidTrajectoryError(f"trajectory {trajectory_id}: a step trajectory, which a pool cannot hold")
        record = with_training(stored)
        self._entries[trajectory_id] = entry_of(record, trajectory_id)
        light = AgentTrajectory(task_id=record.task_id, tokenizer_fingerprint=record.tokenizer_fingerprint)
        self._known[trajectory_id] = light
        return light

    def kept(self, ids: Collection[int], /) -> set[int]:
        return {*ids} & {*self._reader.trajectory_ids.tolist()}

    def newest_id(self) -> int:
        return max(self._reader.trajectory_ids.tolist(), default=-1)


def pool_of_files(directory: Path) -> tuple[SeenPool, str | None]:
    """Return a pool read from its three files into memory, and a warning about unreadable parts or None.

    Trajectories are numbered in file order. The files do not have the number of draws.

    Raises:
        StoreNotFoundError, IncompleteCheckpointError, CorruptStoreError, UnsafeContentError: as by ``read_pool``.
    """
    contents = read_pool(directory)
    lost = list(contents.unreadable)
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    state = PoolState(DifficultyBuckets(contents.difficulty2task_dict), dict.fromkeys(contents.skip_uid_set))
    for task, held in contents.task2trajectories.items():
        entries = []
        for place, trajectory in enumerate(held):
            try:
                (number,) = buffer.add_trajectories([trajectory])
            except InvalidTrajectoryError as error:
                lost.append(f"{directory}: trajectory {place} of task {task!r}: {error}")
                continue
            entries.append(_entry(trajectory, number))
        state.set_entries(task, tuple(entries))
    warning = f"{trajectories(len(lost))} cannot be shown: {listed(lost, 3)}" if lost else None
    return SeenPool(buffer, state, {}, of_files=True), warning


def _entry(one: AgentTrajectory, number: int) -> PoolEntry:
    """Return the entry of a trajectory; if it cannot be replayed, from its document alone."""
    entry = entry_of(one, number)
    if isinstance(entry, PoolEntry):
        return entry
    return PoolEntry.of_record(one, number, token_digest(one))
