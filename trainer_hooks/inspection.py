"""Pool support for operations and the viewer, registered under the entry point group ``trajstore.pools``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trainer_hooks.replay.entry import PoolEntry, Refusal, new_entry
from trainer_hooks.replay.facts import POOL_FACTS
from trainer_hooks.replay.looking import Records, SeenPool, pool_of_files
from trainer_hooks.replay.persistence import (
    BUCKETS_FILE,
    TRAJECTORIES_FILE,
    newest_pool,
    read_buckets,
    read_pool,
    saved_pools,
)
from trainer_hooks.replay.state import recover
from trainer_hooks.replay.store import PoolPoint, newest_point
from trajstore._core.columns.schema import DOCUMENT
from trajstore._core.files.base import Directory
from trajstore._core.reading.shard_access import ShardAccess
from trajstore._core.store.catalog import Catalog
from trajstore.errors import StoreError
from trajstore.operations.measure import turns_of
from trajstore.operations.statistics import agents_report, policy_report, range_of
from trajstore.operations.verification import Problem, Progress, Verification
from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]


def pool_report(catalog: Catalog) -> tuple[Report, npt.NDArray[np.bool_]] | None:
    """Return a report on a store's pool, and a mask of its trajectories over the index.

    Returns:
        ``trajectories``, ``tasks``, ``demonstrations``, ``difficulties`` (tasks by successes), ``skipped_tasks``, and
        ``others``: trajectories that are not in the pool; and the mask. None if the store has no pool, or a
        trainer's recorded rollouts, all of which the other figures then cover.

    Raises:
        CorruptStoreError: the pool's point cannot be decoded.
    """
    if not is_of_a_pool(catalog):
        return None
    access = ShardAccess(catalog)
    try:
        recovered = recover(_Documents(catalog, access), _entry)
        if recovered.among_others:
            return None
    finally:
        access.close()
    live = [entry.trajectory_id for entry in recovered.state.all_entries()]
    report = {
        "trajectories": len(live),
        "tasks": len(recovered.state.entries),
        "demonstrations": recovered.state.demonstrations(),
        "difficulties": {str(key): count for key, count in sorted(recovered.state.buckets.sizes().items())},
        "skipped_tasks": len(recovered.state.skip),
        "others": len(catalog.index) - len(live),
    }
    return report, np.isin(catalog.index["trajectory_id"], np.array(live, np.int64))


def is_of_a_pool(catalog: Catalog) -> bool:
    """Return whether a store has a pool: a saved point with its state."""
    return newest_point(catalog) is not None


def _entry(record: AgentTrajectory, trajectory_id: int) -> PoolEntry | Refusal:
    """Return the entry of a record without tokens; it cannot be compared by tokens."""
    return PoolEntry.of_record(record, trajectory_id, trajectory_id.to_bytes(8, "big"))


class _Documents:
    """The records of a store without their tensors."""

    def __init__(self, catalog: Catalog, access: ShardAccess) -> None:
        self._catalog = catalog
        self._index = catalog.index
        self._access = access

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        return self._read(self._index.position_of(trajectory_id))

    def kept(self, ids: Collection[int], /) -> set[int]:
        return {*ids} & {*self._index["trajectory_id"].tolist()}

    def newest_id(self) -> int:
        return max(self._index["trajectory_id"].tolist(), default=-1)

    def newest_point(self) -> PoolPoint | None:
        return newest_point(self._catalog)

    def _read(self, position: int) -> AgentTrajectory:
        record = self._access.trajectory(self._index, position, (DOCUMENT,))
        if not isinstance(record, AgentTrajectory):
            raise StoreError(f"position {position}: a step trajectory, which a pool cannot hold")
        return record


def inspect_files(directory: Directory) -> Report:
    """Return the report of :func:`trajstore.operations.inspect.inspect` on the three files of an experience pool."""
    contents = read_pool(Path(directory.url))
    refused: Counter[str] = Counter()
    held = [item for items in contents.task2trajectories.values() for item in items]
    malformed = Refusal.MALFORMED.value
    refused[malformed] = len(contents.unreadable)
    trajectories = []  # the well-formed ones
    sizes = directory.sizes()
    for item in held:
        entry = new_entry(item, 0)
        if isinstance(entry, Refusal):
            refused[entry.value] += 1
        if entry is not Refusal.MALFORMED:
            trajectories.append(item)
    total = len(trajectories) + refused[malformed]
    versions = [item.policy_version for item in trajectories if item.policy_version is not None]
    lengths = [len(item.input_ids) for item in trajectories if item.input_ids is not None]
    outcomes = [
        item.reward.outcome for item in trajectories if item.reward is not None and item.reward.outcome is not None
    ]
    turns = [count for item in trajectories if (count := turns_of(item)) is not None]
    messages = sum(bool(item.messages) for item in trajectories)
    return {
        "kind": "experience_pool",
        "path": directory.url,
        "trajectories": total,
        "samples": total,
        "files": len(sizes),
        "size_on_disk": sum(sizes.values()),
        "measured": len(trajectories),
        "tokens": range_of(lengths),
        "replayable": total - refused.total(),
        "refused": dict(+refused),
        "agents": agents_report(len(trajectories), len(contents.task2trajectories), 0, outcomes, turns, messages),
        "policy": policy_report(versions, versions, (), len(trajectories) - len(versions)),
        "difficulties": {str(key): len(tasks) for key, tasks in sorted(contents.difficulty2task_dict.items())},
        "skipped_tasks": len(contents.skip_uid_set),
    }


def verify_files(directory: Directory, result: Verification, progress: Progress | None) -> None:
    """Add the results of ``verify`` for the three files of a pool."""
    contents = read_pool(Path(directory.url))
    sizes = directory.sizes()
    result.files, result.nbytes = len(sizes), sum(sizes.values())
    result.trajectories = sum(map(len, contents.task2trajectories.values()))
    result.problems += [Problem(TRAJECTORIES_FILE, problem) for problem in contents.unreadable]
    bucket_of: dict[str, str] = {}
    for difficulty, tasks in orjson.loads(directory.read(BUCKETS_FILE)).items():  # a dict, as read_pool has checked
        for task in tasks:
            if task in bucket_of:
                problem = f"task {task} is in the buckets {bucket_of[task]} and {difficulty}; the later one counts"
                result.notes.append(f"{BUCKETS_FILE}: {problem}")
            bucket_of[task] = difficulty
    if progress is not None:
        progress(1, 1)


class Support:
    """The functions of :class:`~trajstore.operations.pools.PoolSupport`."""

    facts = POOL_FACTS

    report = staticmethod(pool_report)
    is_pool = staticmethod(is_of_a_pool)
    inspect_files = staticmethod(inspect_files)
    verify_files = staticmethod(verify_files)
    records = Records

    newest_files = staticmethod(newest_pool)

    @staticmethod
    def of_files(base: Path, newest: Path) -> tuple[SeenPool, str | None]:
        pool, damage = pool_of_files(newest)
        buckets = {step: read_buckets(folder) for step, folder in saved_pools(base).items()}
        difficulties = {
            step: {key: len(tasks) for key, tasks in tasks_of.items()} for step, tasks_of in buckets.items()
        }
        return replace(pool, difficulties=difficulties), damage


SUPPORT = Support()
