"""Pools between a store and files, and rollouts that exist already into a pool: what ``trajstore pool`` does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trajstore.closing import Closing
from trajstore.errors import ConfigurationError, StoreError, StoreNotFoundError
from trajstore.experience.persistence import newest_pool
from trajstore.experience.pool import ExperienceManager
from trajstore.experience.rules import PoolRules
from trajstore.experience.store import BufferStore
from trajstore.reading.places import POOL_FILES
from trajstore.trajectory import AgentTrajectory


@dataclass(frozen=True)
class Exchanged:
    """What an export or import did."""

    source: str
    """Where it was read from: of several ``step_N`` the one that was taken."""
    trajectories: int
    """Trajectories in the pool afterwards."""
    tasks: int
    """Tasks with trajectories."""
    refused: Counter[str]
    """How many were not taken, by reason."""


def export_pool(store: str | Path, folder: str | Path, rules: PoolRules) -> Exchanged:
    """Write the pool of a store as files, ``difficulty2task_dict.json`` and the others; also of a run that goes on.

    Args:
        store: directory or URL of the pool's store; only read.
        folder: to be written, such as ``experience_pool/step_120``; one that exists is replaced.
        rules: of the run that made the pool, as far as they say what a task keeps.

    Raises:
        StoreNotFoundError: there is no store.
        CorruptStoreError: the store holds no pool that can be understood.
        StoreWriteError: the folder did not reach the disk.
    """
    with _Reader(store) as reader:
        manager = ExperienceManager(rules, store=reader)
        manager.save_experience_pool_to_disk(folder)
        return _exchanged(store, manager)


def import_pool(store: str | Path, source: str | Path, rules: PoolRules, *, replace: bool = False) -> Exchanged:
    """Fill the pool of a store, which is made if there is none, from files or from rollouts.

    Args:
        store: directory or URL of the pool's store.
        source: files of a pool (ours or AgentEvolver's), a folder ``experience_pool`` (its newest step), or a store of
            agent rollouts, which enter step by step in order of their policy versions.
        rules: what enters.
        replace: whether a pool that holds something may be replaced by files. Rollouts are always added.

    Raises:
        ConfigurationError: the pool holds something and is not to be replaced, or is of another tokenizer.
        StoreNotFoundError: there is nothing at ``source``.
        StoreLockedError: a run is using the store.
        CorruptStoreError: what lies there cannot be read.
    """
    path = Path(source)
    files = path if (path / POOL_FILES[0]).is_file() else newest_pool(path)
    buffer = BufferStore.open(store)
    try:
        manager = ExperienceManager(rules, store=buffer)
        if files is None:
            with _Reader(source) as reader:
                for step, made in itertools.groupby(reader.rollouts(), lambda one: one.policy_version):
                    manager.global_steps = manager.global_steps if step is None else step
                    rollouts = list(made)
                    manager.admit(rollouts, _asked(rollouts))
        else:
            if len(manager) and not replace:
                raise ConfigurationError(
                    f"{store}: the pool holds {len(manager)} trajectories, which an import from files replaces; say so"
                    " (--replace), or give another store"
                )
            manager.load_experience_pool_from_disk(files)
        manager.flush()
        return _exchanged(files or source, manager)
    finally:
        buffer.close()


def _exchanged(source: str | Path, manager: ExperienceManager) -> Exchanged:
    return Exchanged(str(source), len(manager), len(manager.get_task_ids()), manager.refused)


def _asked(rollouts: Sequence[AgentTrajectory]) -> dict[str, int]:
    """Return how many rollouts each task was to make, where a recorder said so (``metadata["task_rollouts"]``)."""
    said = {one.task_id: one.metadata.get("task_rollouts") for one in rollouts}
    return {task: count for task, count in said.items() if isinstance(count, int)}


class _Reader(Closing):
    """A store of agent trajectories that is only read, as a pool's store."""

    durable = True

    def __init__(self, path: str | Path) -> None:
        from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer

        if "://" not in str(path) and not Path(path).is_dir():
            raise StoreNotFoundError(f"{path}: no such directory")
        self.store_id = ""
        self._path = path
        self._buffer = TrajectoryReplayBuffer(enable_cache=False)
        self._buffer.load_checkpoint(str(path))

    def rollouts(self) -> Iterator[AgentTrajectory]:
        """Return all that have a task, in order of their policy versions, unknown ones first."""
        found = (self.get(number) for number in self.ids())
        known = [one for one in found if one.task_id]
        return iter(sorted(known, key=lambda one: -1 if one.policy_version is None else one.policy_version))

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        trajectory = self._buffer.get(trajectory_id)
        if not isinstance(trajectory, AgentTrajectory):
            raise ConfigurationError(f"{self._path}: trajectory {trajectory_id} is a step trajectory, not an agent's")
        return trajectory

    def ids(self) -> list[int]:
        return [int(number) for number in self._buffer.trajectory_ids]

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        raise StoreError(f"{self._path}: is only read")

    def evict(self, ids: Sequence[int], /) -> None:
        raise StoreError(f"{self._path}: is only read")

    def flush(self) -> None:
        """Do nothing: nothing is written."""

    def close(self) -> None:
        self._buffer.close()
