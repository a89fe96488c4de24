"""Looking into a directory: totals, columns, rewards, policy versions, gaps, integrity at a glance.

Nothing is written, and no writer is needed. All reports are JSON values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.catalog import Catalog
from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.fields import Axis
from trajstore.index import TrajectoryIndex
from trajstore.limits import UNKNOWN_VERSION
from trajstore.maintenance import SHARDS_FOLDER
from trajstore.places import Place, find_place, mixed_sentence
from trajstore.schema import DOCUMENT
from trajstore.shard_access import ShardAccess
from trajstore.statistics import (
    RewardStatistics,
    id_gaps,
    policy_report,
    range_of,
    sampled_rows,
    tensor_report,
)
from trajstore.storage import Directory
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Trajectory

Report = dict[str, Any]
Progress = Callable[[int, int], None]
"""Told (done, total)."""

MEASURED_AT_MOST = 2_000
"""Rewards and episodes are read from this many of the newest trajectories unless said otherwise."""

_SHOWN_GAPS = 20


def inspect(path: str | Path, measure: int = MEASURED_AT_MOST, progress: Progress | None = None) -> Report:
    """Return a report on a store, a checkpoint, a directory of RLinf, an experience pool, or a folder of these.

    Args:
        path: local path or URL.
        measure: rewards and episodes are read from this many of the newest trajectories; 0 = all.
        progress: told how many of these have been read.

    Returns:
        ``kind``, ``path``, ``trajectories``, ``samples``, ``files``, ``size_on_disk`` (bytes) and, where they
        are known, ``format``, ``columns``, ``steps`` (T, or tokens), ``batch`` (B), ``rewards``, ``episodes``,
        ``agents``, ``policy``, ``ids``, ``integrity``. What is not known is None or absent, never 0.
        A folder has ``parts``: a report each.

    Raises:
        StoreNotFoundError: nothing there.
        CorruptStoreError: damaged beyond a report; ``trajstore.verify`` says more.
        UnsafeContentError: a name leaves the directory, or a pickle would run code; nothing of it was run.
        UnsupportedVersionError: written by a newer trajstore.
    """
    return _inspect_place(find_place(path), measure, progress)


def _inspect_place(place: Place, measure: int, progress: Progress | None) -> Report:
    if place.kind == "store":
        return _inspect_store(place.directory, measure, progress)
    if place.kind == "rlinf":
        from trajstore.foreign import inspect_rlinf  # other programs' directories, seldom looked into

        return inspect_rlinf(place.directory, measure, progress)
    if place.kind == "experience_pool":
        from trajstore.foreign import inspect_pool

        return inspect_pool(place.directory)
    parts = [_inspect_place(part, measure, progress) for part in place.parts]
    totals = {key: sum(part[key] for part in parts) for key in ("trajectories", "samples", "files", "size_on_disk")}
    problems = [f"{place.url}: {text}" for text in place.lacking]
    if place.mixed:
        problems.append(mixed_sentence(place.url, [part.name for part in place.parts[1:]]))
    return {"kind": "run", "path": place.url, **totals, "integrity": {"problems": problems}, "parts": parts}


def _inspect_store(directory: Directory, measure: int, progress: Progress | None) -> Report:
    catalog = Catalog.open(directory)
    index = catalog.index
    metadata = catalog.metadata()
    sizes = directory.sizes()
    report: Report = {
        "kind": "store",
        "path": directory.url,
        "trajectories": len(index),
        "samples": index.total_samples,
        "files": len(sizes),
        "size_on_disk": sum(sizes.values()),
        "format": metadata.get("trajectory_format"),
        "layout_version": metadata["layout_version"],
        "generation": catalog.generation,
        "shards": int(catalog.needed_shards().sum()),
        "pinned": len(catalog.pinned),
        "next_id": catalog.next_id,
        "columns": _columns(catalog),
        "steps": range_of(index["steps"]),
        "batch": range_of(index["batch"]),
        "max_episode_length": range_of(index["max_episode_length"][index["max_episode_length"] > 0]),
        "ids": _ids(index["trajectory_id"]),
        "policy": _policy(index),
        "integrity": _integrity(catalog, sizes),
    }
    return report | _measure(catalog, measure, progress)


def _columns(catalog: Catalog) -> list[Report]:
    """Return the columns of the live trajectories with the bytes of their rows; one entry per name and type."""
    index = catalog.index
    rows_on = _rows_by_axis(index)
    schema_of = catalog.shards.schema_numbers()[index["shard"]] if len(index) else np.zeros(0, np.int32)
    totals: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for number in np.unique(schema_of).tolist():
        of_schema = schema_of == number
        for column in catalog.shards.schemas[number].columns:
            key = (column.name, column.dtype, column.row_shape)
            nbytes = int(rows_on[column.axis][of_schema].sum()) * column.row_nbytes
            totals[key] = totals.get(key, 0) + nbytes
    return [
        {"name": name, "dtype": dtype, "row_shape": list(shape), "bytes": nbytes}
        for (name, dtype, shape), nbytes in totals.items()
    ]


def _rows_by_axis(index: TrajectoryIndex) -> dict[Axis, npt.NDArray[np.int64]]:
    steps, batch, extra = (index[name].astype(np.int64) for name in ("steps", "batch", "extra"))
    with_extra = (steps + extra) * batch
    return {
        Axis.SAMPLES: steps * batch,
        Axis.FIRST_EXTRA: with_extra,
        Axis.LAST_EXTRA: with_extra,
        Axis.RESPONSE: extra,
        Axis.DOCUMENT: index["document"].astype(np.int64),
    }


def _ids(ids: npt.NDArray[np.int64]) -> Report | None:
    if not len(ids):
        return None
    gaps = id_gaps(ids)
    return {
        "first": int(ids.min()),
        "last": int(ids.max()),
        "missing": sum(last - first + 1 for first, last in gaps),
        "gaps": gaps[:_SHOWN_GAPS],
    }


def _policy(index: TrajectoryIndex) -> Report:
    known = index["version_low"] != UNKNOWN_VERSION
    lows, highs = index["version_low"][known].tolist(), index["version_high"][known].tolist()
    weights = [index.weights[number] for number in np.unique(index["weights"]).tolist()]
    return policy_report(lows, highs, weights, unknown=int((~known).sum()))


def _integrity(catalog: Catalog, sizes: dict[str, int]) -> Report:
    """Return what names and sizes tell; checksums are left to ``verify``."""
    problems: list[str] = []
    needed = np.flatnonzero(catalog.needed_shards()).tolist()
    expected = {file.name: file.size for row in needed for file in catalog.shards.manifest(row).files}
    for name, size in expected.items():
        if name not in sizes:
            problems.append(f"{name}: missing")
        elif sizes[name] != size:
            problems.append(f"{name}: has {sizes[name]:,} bytes, must have {size:,}")
    unnamed = [name for name in sizes if name.startswith(SHARDS_FOLDER + "/") and name not in expected]
    return {"problems": problems, "unnamed_files": len(unnamed), "torn_log_bytes": catalog.segment_torn}


def _measure(catalog: Catalog, measure: int, progress: Progress | None) -> Report:
    """Read rewards, episodes and outcomes of the newest trajectories."""
    index = catalog.index
    count = len(index) if measure == 0 else min(measure, len(index))
    access = ShardAccess(catalog)
    result = _Measurement()
    unreadable = 0
    for done, position in enumerate(range(index.end - count, index.end)):
        try:
            result.add(access, index, position)
        except CorruptStoreError:
            unreadable += 1
        if progress is not None:
            progress(done + 1, count)
    access.close()
    return {"measured": count - unreadable, "unreadable": unreadable, **result.report()}


class _Measurement:
    """What is read of trajectories of either kind."""

    def __init__(self) -> None:
        self._rewards = RewardStatistics()
        self._outcomes: list[float] = []
        self._tasks: set[str] = set()
        self._agents = 0

    def add(self, access: ShardAccess, index: TrajectoryIndex, position: int) -> None:
        if access.schema(index, position).kind == "step":
            found = access.columns(index, position, ("rewards", "dones"))
            if "rewards" in found:
                self._rewards.add(found["rewards"], found.get("dones"))
            return
        trajectory = access.trajectory(index, position, (DOCUMENT,))
        if isinstance(trajectory, AgentTrajectory):
            self._agents += 1
            self._tasks.add(trajectory.task_id)
            if trajectory.reward is not None and trajectory.reward.outcome is not None:
                self._outcomes.append(trajectory.reward.outcome)

    def report(self) -> Report:
        agents = {"tasks": len(self._tasks), "outcomes": range_of(self._outcomes)} if self._agents else None
        return {
            "rewards": self._rewards.rewards_report(),
            "episodes": self._rewards.episodes_report(),
            "agents": agents,
        }


def inspect_trajectory(path: str | Path, trajectory_id: int, sample: int | None = None) -> Report:
    """Return a report on one trajectory of a store, or on one of its samples.

    Args:
        path: local path or URL of a store.
        trajectory_id: its id.
        sample: number of a transition, ``t * B + b`` (step), or of a token (agent).

    Raises:
        TrajectoryUnavailableError: no trajectory has this id.
        ConfigurationError: it has fewer samples, or the path is no store.
    """
    place = find_place(path)
    if place.kind != "store":
        raise ConfigurationError(f"{path}: single trajectories can be shown of a store, this is a {place.kind}")
    catalog = Catalog.open(place.directory)
    position = catalog.index.position_of(trajectory_id)
    entry = catalog.index.entry(position)
    access = ShardAccess(catalog)
    trajectory = access.trajectory(catalog.index, position)
    columns = access.columns(catalog.index, position)
    access.close()
    report: Report = {
        "path": place.url,
        "trajectory_id": trajectory_id,
        "uuid": entry.uuid,
        "kind": access.schema(catalog.index, position).kind,
        "samples": entry.num_samples,
        "steps": entry.extent.steps,
        "batch": entry.extent.batch,
        "max_episode_length": entry.max_episode_length or None,
        "model_weights_id": entry.model_weights_id or None,
        "versions": list(entry.versions) if entry.versions is not None else None,
        "shard": catalog.shards.manifest(entry.shard).files[0].name,
    }
    if sample is None:
        tensors = {name: tensor for name, tensor in columns.items() if name != DOCUMENT}
        return report | {"columns": [tensor_report(*item) for item in tensors.items()], **_words(trajectory)}
    rows = entry.extent.steps * entry.extent.batch
    if not 0 <= sample < rows:
        raise ConfigurationError(f"sample {sample}: trajectory {trajectory_id} has the samples 0 to {rows - 1}")
    values = _sample_values(columns, entry.extent.steps, entry.extent.batch, sample)
    return report | {
        "sample": sample,
        "step": sample // entry.extent.batch,
        "environment": sample % entry.extent.batch,
        "values": values,
    }


def _words(trajectory: AnyTrajectory) -> Report:
    """Return what an agent trajectory holds besides tensors."""
    if isinstance(trajectory, Trajectory):
        return {}
    reward = trajectory.reward
    return {
        "task_id": trajectory.task_id,
        "query": trajectory.query,
        "outcome": None if reward is None else reward.outcome,
        "messages": trajectory.messages,
        "metadata": trajectory.metadata,
    }


def _sample_values(columns: dict[str, torch.Tensor], steps: int, batch: int, sample: int) -> dict[str, Any]:
    """Return the row of one transition (step), or the entries of one token (agent)."""
    values: dict[str, Any] = {}
    for name, tensor in columns.items():
        if name == DOCUMENT:
            continue
        if tensor.dim() > 1:  # [T (+ E), B, ...]
            row = sampled_rows(tensor, steps, name)[sample // batch, sample % batch]
        elif tensor.shape[0] == steps:  # one per token; those of the response alone are shorter
            row = tensor[sample]
        else:
            continue
        values[name] = (row.float() if row.is_floating_point() else row).tolist()
    return values
