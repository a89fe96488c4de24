"""A pool as files: ``experience_pool/step_N/`` with two JSON documents and a pickle of plain containers.

==================================== ============================================================
``difficulty2task_dict.json``        ``{"3": ["task_1", ...], ...}``
``skip_uid_set.json``                ``["task_7", ...]``
``task2trajectories.pkl``            ``{"task_1": [{field: value}, ...], ...}``: rollouts as in files
                                     of the format ``jsonl`` (:mod:`trajstore.interop.rollouts`)
==================================== ============================================================

AgentEvolver writes the same three files, but pickles objects of its own classes; these can be read too
(:mod:`trainer_hooks.replay.agentevolver`). AgentEvolver cannot read ours, since its code expects its own objects.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson

from trainer_hooks.replay.agentevolver import LEFT_OUT, PACKAGES, ForeignObject, from_agentevolver
from trainer_hooks.replay.outcomes import outcome_of
from trajstore._core.base.settings import Whole
from trajstore._core.columns.limits import shown
from trajstore._core.files.base import EncodedFile
from trajstore._core.files.folders import publish_folder
from trajstore._core.files.held import check_path
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats.pickles.safe_pickle import safe_loads
from trajstore._core.reading.places import POOL_FILES
from trajstore.errors import (
    CorruptStoreError,
    IncompleteCheckpointError,
    StoreNotFoundError,
    StoreWriteError,
    counted,
    listed,
)
from trajstore.interop.rollouts import rollout_of, row_of
from trajstore.trajectory import AgentTrajectory, Reward

logger = logging.getLogger(__name__)

TRAJECTORIES_FILE, BUCKETS_FILE, SKIP_FILE = POOL_FILES

T = TypeVar("T")

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class PoolContents:
    """Contents of the three files."""

    difficulty2task_dict: dict[int, list[str]]
    skip_uid_set: list[str]
    task2trajectories: dict[str, list[AgentTrajectory]]
    unreadable: list[str] = dataclasses.field(default_factory=list)
    """Location and reason for each trajectory left out as unreadable."""


def newest_pool(base: str | Path) -> Path | None:
    """Return the newest complete ``step_N`` below the folder ``base``; ``None`` if there is none."""
    base = Path(base)
    pools: list[tuple[int, Path]] = []
    for path in base.iterdir() if base.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match is not None and all((path / name).is_file() for name in POOL_FILES):
            pools.append((int(match.group(1)), path))
    return max(pools)[1] if pools else None


def write_pool(directory: Path, contents: PoolContents) -> None:
    """Write a pool atomically; an existing directory is replaced.

    Raises:
        StoreWriteError: it did not reach the disk.
    """
    buckets = {str(difficulty): tasks for difficulty, tasks in sorted(contents.difficulty2task_dict.items())}
    plain = {task: [row_of(one, {}) for one in held] for task, held in contents.task2trajectories.items()}
    files = [
        EncodedFile(BUCKETS_FILE, [orjson.dumps(buckets)]),
        EncodedFile(SKIP_FILE, [orjson.dumps(contents.skip_uid_set)]),
        EncodedFile(TRAJECTORIES_FILE, [pickle.dumps(plain, protocol=4)]),
    ]
    try:
        with publish_folder(directory) as target:
            target.publish(files)
    except OSError as error:
        raise StoreWriteError(f"{directory}: the experience pool could not be written: {error}") from error


def read_pool(directory: Path, prefix: str = "") -> PoolContents:
    """Return a saved pool, ours or AgentEvolver's. No code named in the pickle is run.

    Unreadable trajectories are left out and reported, unless all are unreadable.

    Args:
        directory: with the three files.
        prefix: prepended to the name of every task.

    Raises:
        StoreNotFoundError: no such directory.
        IncompleteCheckpointError: a file is absent.
        CorruptStoreError: a file has invalid contents.
        UnsafeContentError: the pickle names an object that does not belong in a pool.
    """
    if not check_path(directory).is_dir():
        raise StoreNotFoundError(f"{directory}: no experience pool here")
    buckets = {number: [prefix + task for task in tasks] for number, tasks in _read_buckets(directory).items()}
    skip = [prefix + task for task in _json(directory / SKIP_FILE, list[str])]
    path = directory / TRAJECTORIES_FILE
    value = safe_loads(
        _bytes(path), packages=dict.fromkeys(PACKAGES, ForeignObject), left_out=LEFT_OUT, source=str(path)
    )
    if not isinstance(value, dict):
        raise CorruptStoreError(f"{path}: must hold a dict of task ids, holds a {type(value).__name__}")
    trajectories: dict[str, list[AgentTrajectory]] = {}
    unreadable: list[str] = []
    for task, held in value.items():
        if not isinstance(task, str) or not task or not isinstance(held, list):
            raise CorruptStoreError(f"{path}: task {task!r} must be a name with a list of trajectories")
        named = trajectories[prefix + task] = []
        for number, item in enumerate(held):
            try:
                named.append(dataclasses.replace(_trajectory(item, task), task_id=prefix + task))
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
                unreadable.append(f"{path}: task {task!r} has a trajectory ({number}) that cannot be read: {error!r}")
    if unreadable and not any(trajectories.values()):
        raise CorruptStoreError(unreadable[0])  # not one damaged trajectory, but another program's or version's pool
    return PoolContents(buckets, skip, trajectories, unreadable)


def _trajectory(one: Any, task: str) -> AgentTrajectory:
    """Return an item of a task's list as a trajectory.

    Raises:
        ValueError: it is not a trajectory of that task (also AttributeError, KeyError, OverflowError, RuntimeError,
            TypeError).
    """
    trajectory = from_agentevolver(one, task) if isinstance(one, ForeignObject) else rollout_of(one)
    for name, kind in (("rollout_id", str), ("metadata", dict), ("messages", list), ("reward", Reward | None)):
        if not isinstance(getattr(trajectory, name), kind):
            raise TypeError(f"field {name}: {shown(getattr(trajectory, name))}")
    outcome_of(trajectory)
    if trajectory.task_id != task:
        raise ValueError("it names another task")
    return trajectory


def _bytes(path: Path) -> bytes:
    try:
        return LocalDirectory(path.parent).read(path.name)
    except FileNotFoundError:
        raise IncompleteCheckpointError(f"{path}: absent; a saved pool has {', '.join(POOL_FILES)}") from None


def _json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_bytes(path), type=kind)
    except msgspec.DecodeError as error:
        raise CorruptStoreError(f"{path}: {error}") from error


def _read_buckets(directory: Path) -> dict[int, list[str]]:
    """Return the tasks of a saved pool by difficulty.

    Raises:
        IncompleteCheckpointError: the file is absent.
        CorruptStoreError: the file has invalid contents.
    """
    path = directory / BUCKETS_FILE
    buckets: dict[int, list[str]] = {}
    place: dict[str, int] = {}
    twice: list[str] = []
    for difficulty, tasks in _json(path, dict[Whole, list[str]]).items():
        for task in tasks:
            earlier = place.get(task)
            if earlier is not None and earlier != difficulty:
                twice.append(task)
                buckets[earlier].remove(task)
            if earlier != difficulty:
                place[task] = difficulty
                buckets.setdefault(difficulty, []).append(task)
    if twice:
        logger.warning(
            "%s: %s in two buckets, as AgentEvolver leaves them (%s): the later one in the file counts",
            path,
            counted(len(twice), "task", "is", "are"),
            listed(dict.fromkeys(twice)),
        )
    return {difficulty: tasks for difficulty, tasks in buckets.items() if tasks}
