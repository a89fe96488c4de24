"""Looking into directories that other programs wrote: RLinf's replay buffers and experience pools."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.catalog import INDEX_NAME, METADATA_NAME
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError
from trajstore.places import OLD_INDEX_NAME, file_sizes
from trajstore.record import Record, record_of
from trajstore.statistics import RewardStatistics, id_gaps, policy_report, range_of
from trajstore.storage import Directory, check_name
from trajstore.trajectory import Trajectory

Report = dict[str, Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RLinfEntry:
    """One trajectory as an index of RLinf describes it."""

    trajectory_id: int
    num_samples: int
    shape: tuple[int, ...]
    max_episode_length: int
    model_weights_id: str
    file: str


@dataclass(frozen=True)
class RLinfDirectory:
    """Index and metadata of a directory that RLinf wrote."""

    directory: Directory
    metadata: Mapping[str, Any]
    entries: tuple[RLinfEntry, ...]

    def load(self, entry: RLinfEntry) -> Record:
        """Return a trajectory as columns; runs no code.

        Raises:
            CorruptStoreError: the file is absent, damaged, or no trajectory.
            UnsafeContentError: the file names something that a trajectory does not contain.
        """
        source = f"{self.directory.url}/{entry.file}"
        try:
            data = self.directory.read(entry.file)
        except FileNotFoundError as error:
            raise CorruptStoreError(f"{source}: named by the index, but missing") from error
        content = _parse_pickle(data, source) if entry.file.endswith(".pkl") else _parse_torch(data, source)
        known = {item.name for item in fields(Trajectory)}
        if not isinstance(content, dict) or not known & content.keys():
            raise CorruptStoreError(f"{source}: not a trajectory")
        try:
            return record_of(
                Trajectory(**{key: value for key, value in content.items() if key in known and value is not None})
            )
        except InvalidTrajectoryError as error:
            raise CorruptStoreError(f"{source}: {error}") from error


def read_rlinf(directory: Directory) -> RLinfDirectory:
    """Return index and metadata of a directory that RLinf wrote.

    Raises:
        CorruptStoreError: they are absent or not what their names say.
        UnsafeContentError: a file name leaves the directory.
    """
    top = {name for name in directory.names() if "/" not in name}
    index_name = INDEX_NAME if INDEX_NAME in top or OLD_INDEX_NAME not in top else OLD_INDEX_NAME
    for name in (METADATA_NAME, index_name):
        if name not in top:
            raise CorruptStoreError(f"{directory.url}/{name}: missing; restore it from a copy")
    metadata = _parse_json(directory, METADATA_NAME)
    index = _parse_json(directory, index_name)
    suffix = str(metadata.get("trajectory_format", "pt"))
    try:
        entries = tuple(
            _entry(int(number), index["trajectory_index"][str(number)], suffix)
            for number in index["trajectory_id_list"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"{directory.url}/{index_name}: not an index of RLinf: {error!r}") from error
    return RLinfDirectory(directory, metadata, entries)


def _entry(number: int, value: Mapping[str, Any], suffix: str) -> RLinfEntry:
    weights = str(value["model_weights_id"])
    return RLinfEntry(
        trajectory_id=number,
        num_samples=int(value["num_samples"]),
        shape=tuple(int(n) for n in value["shape"]),
        max_episode_length=int(value["max_episode_length"]),
        model_weights_id=weights,
        file=check_name(f"trajectory_{number}_{weights}.{suffix}"),
    )


def _parse_json(directory: Directory, name: str) -> dict[str, Any]:
    try:
        value = orjson.loads(directory.read(name))
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{directory.url}/{name}: {error}; restore it from a copy") from error
    if not isinstance(value, dict):
        raise CorruptStoreError(f"{directory.url}/{name}: not a JSON object")
    return value


def _parse_torch(data: bytes, source: str) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises nearly anything on damaged files
        raise CorruptStoreError(f"{source}: cannot be loaded without running code, or damaged: {error}") from error


def _parse_pickle(data: bytes, source: str) -> Any:
    from trajstore.formats.safe_pickle import safe_loads

    return safe_loads(data, source=source)


def inspect_rlinf(directory: Directory, measure: int, progress: Progress | None) -> Report:
    """Return the report of :func:`trajstore.inspect.inspect` on a directory that RLinf wrote."""
    found = read_rlinf(directory)
    entries = found.entries
    present = file_sizes(directory)
    missing = [entry.file for entry in entries if entry.file not in present]
    readable = [entry for entry in entries if entry.file in present]
    count = len(readable) if measure == 0 else min(measure, len(readable))
    ids = np.array([entry.trajectory_id for entry in entries], np.int64)
    gaps = id_gaps(ids)
    steps, batch = (np.array([entry.shape[axis] for entry in entries if len(entry.shape) > 1]) for axis in (0, 1))
    report: Report = {
        "kind": "rlinf",
        "path": directory.url,
        "trajectories": len(entries),
        "samples": sum(entry.num_samples for entry in entries),
        "files": len(present),
        "size_on_disk": sum(present.values()),
        "format": found.metadata.get("trajectory_format"),
        "next_id": found.metadata.get("trajectory_counter"),
        "steps": range_of(steps),
        "batch": range_of(batch),
        "max_episode_length": range_of([e.max_episode_length for e in entries if e.max_episode_length > 0]),
        "ids": None
        if not entries
        else {
            "first": int(ids.min()),
            "last": int(ids.max()),
            "missing": sum(last - first + 1 for first, last in gaps),
            "gaps": gaps[:20],
        },
        "integrity": {"problems": [f"{name}: named by the index, but missing" for name in missing]},
    }
    return report | _measure_rlinf(found, readable[len(readable) - count :], progress)


def _measure_rlinf(found: RLinfDirectory, entries: list[RLinfEntry], progress: Progress | None) -> Report:
    """Read trajectories whole: RLinf's files have no columns to pick from."""
    rewards = RewardStatistics()
    lows: list[int] = []
    highs: list[int] = []
    columns: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for done, entry in enumerate(entries):
        record = found.load(entry)
        tensors = dict(zip((column.name for column in record.schema.columns), record.tensors, strict=True))
        for column, tensor in zip(record.schema.columns, record.tensors, strict=True):
            key = (column.name, column.dtype, column.row_shape)
            columns[key] = columns.get(key, 0) + tensor.nbytes
        if "rewards" in tensors:
            rewards.add(tensors["rewards"], tensors.get("dones"))
        if record.versions is not None:
            lows.append(record.versions[0])
            highs.append(record.versions[1])
        if progress is not None:
            progress(done + 1, len(entries))
    return {
        "measured": len(entries),
        "columns": [
            {"name": name, "dtype": dtype, "row_shape": list(shape), "bytes": nbytes}
            for (name, dtype, shape), nbytes in columns.items()
        ],
        "rewards": rewards.rewards_report(),
        "episodes": rewards.episodes_report(),
        "policy": policy_report(lows, highs, (e.model_weights_id for e in found.entries), len(entries) - len(lows)),
    }


def inspect_pool(directory: Directory) -> Report:
    """Return the report of :func:`trajstore.inspect.inspect` on the three files of an experience pool."""
    from trajstore.experience.persistence import read_pool

    contents = read_pool(Path(directory.url))
    trajectories = [item for items in contents.task2trajectories.values() for item in items]
    sizes = file_sizes(directory)
    versions = [item.policy_version for item in trajectories if item.policy_version is not None]
    lengths = [len(item.input_ids) for item in trajectories if item.input_ids is not None]
    outcomes = [
        item.reward.outcome for item in trajectories if item.reward is not None and item.reward.outcome is not None
    ]
    return {
        "kind": "experience_pool",
        "path": directory.url,
        "trajectories": len(trajectories),
        "samples": len(trajectories),
        "files": len(sizes),
        "size_on_disk": sum(sizes.values()),
        "measured": len(trajectories),
        "steps": range_of(lengths),
        "agents": {"tasks": len(contents.task2trajectories), "outcomes": range_of(outcomes)},
        "policy": policy_report(versions, versions, (), len(trajectories) - len(versions)),
        "difficulties": {str(key): len(tasks) for key, tasks in sorted(contents.difficulty2task_dict.items())},
        "skipped_tasks": len(contents.skip_uid_set),
    }


def iterate_rlinf(found: RLinfDirectory) -> Iterator[tuple[RLinfEntry, Record | CorruptStoreError]]:
    """Yield every entry with its trajectory, or with what is wrong with it."""
    for entry in found.entries:
        try:
            yield entry, found.load(entry)
        except CorruptStoreError as error:
            yield entry, error
