"""Reports on directories written by RLinf."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.files.base import Directory
from trajstore._core.reading.rlinf_source import OR_WITHOUT_IT, RLinfSource
from trajstore.errors import CorruptStoreError, UnsafeContentError
from trajstore.operations.measure import broken_epochs, row_keys, seam_names
from trajstore.operations.statistics import (
    RewardStatistics,
    Seam,
    columns_report,
    ids_report,
    policy_report,
    range_of,
)
from trajstore.operations.verification import Progress

Report = dict[str, Any]

MISSING = "named by the index, but missing"


def inspect_rlinf(directory: Directory, measure: int, progress: Progress | None) -> Report:
    """Return the report of :func:`trajstore.operations.inspect.inspect` on a directory of RLinf."""
    source = RLinfSource.open(directory, strict=False)
    readable, missing = source.entries, source.missing
    entries = sorted([*readable, *missing], key=lambda entry: entry.trajectory_id)
    present = directory.sizes()
    count = len(readable) if measure == 0 else min(measure, len(readable))
    ids = np.array([entry.trajectory_id for entry in entries], np.int64)
    steps, batch = (np.array([entry.shape[axis] for entry in entries if len(entry.shape) > 1]) for axis in (0, 1))
    report: Report = {
        "kind": "rlinf",
        "path": directory.url,
        "trajectories": len(entries),
        "samples": sum(entry.num_samples for entry in entries),
        "files": len(present),
        "size_on_disk": sum(present.values()),
        "format": source.metadata.get("trajectory_format"),
        "next_id": source.metadata.get("trajectory_counter"),
        "steps": range_of(steps),
        "batch": range_of(batch),
        "max_episode_length": range_of([e.max_episode_length for e in entries if e.max_episode_length > 0]),
        "ids": ids_report(ids, without_file=len(missing)),
        "integrity": {
            "problems": [
                *(str(damage).removeprefix(f"{directory.url}/") for damage in source.damaged),
                *(f"{e.file_name(source.suffix)}: {MISSING}" for e in source.gone),
            ]
        },
    }
    problems = report["integrity"]["problems"]
    return report | _measure_rlinf(source, range(len(readable) - count, len(readable)), progress, problems)


def _measure_rlinf(found: RLinfSource, rows: range, progress: Progress | None, problems: list[str]) -> Report:
    """Measure whole trajectories: RLinf's files have no separate columns. Unreadable files are added to problems."""
    rewards = RewardStatistics(whole=rows.start == 0)
    lows: list[int] = []
    highs: list[int] = []
    columns: dict[tuple[str, str, tuple[int, ...]], int] = {}
    measured = 0
    for done, row in enumerate(rows):
        if progress is not None:
            progress(done + 1, len(rows))
        try:
            flat = found.flat(row)
        except (CorruptStoreError, UnsafeContentError) as error:
            problems.append(str(error).removeprefix(f"{found.directory.url}/").removesuffix(OR_WITHOUT_IT))
            continue
        measured += 1
        tensors = dict(zip((column.name for column in flat.schema.columns), flat.tensors, strict=True))
        for column, tensor in zip(flat.schema.columns, flat.tensors, strict=True):
            key = (column.name, column.dtype, column.row_shape)
            columns[key] = columns.get(key, 0) + tensor.nbytes
        if "rewards" in tensors:
            blocks = {name: _block(tensors[name], flat) for name in ("rewards", "dones") if name in tensors}
            seam = _seam(flat, tensors, found.entries[row].trajectory_id)
            broken = broken_epochs(flat.schema, flat.extent, partial(_rows, flat, tensors))
            rewards.add(blocks["rewards"], blocks.get("dones"), seam, broken)
        if flat.versions is not None:
            lows.append(flat.versions[0])
            highs.append(flat.versions[1])
    return {
        "measured": measured,
        "columns": columns_report(columns),
        "rewards": rewards.rewards_report(),
        "episodes": rewards.episodes_report(),
        "policy": policy_report(lows, highs, (e.model_weights_id for e in found.entries), measured - len(lows)),
    }


def _block(rows: torch.Tensor, flat: FlatTrajectory) -> torch.Tensor:
    """Return the rows ``[(T + E) * B, C]`` of a column as ``[T + E, B, C]``."""
    return rows.reshape(rows.shape[0] // flat.extent.batch, flat.extent.batch, -1)


def _rows(flat: FlatTrajectory, tensors: dict[str, torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
    return tensors[name].reshape(flat.extent.steps * flat.extent.batch, -1)[start:stop]


def _seam(flat: FlatTrajectory, tensors: dict[str, torch.Tensor], number: int) -> Seam | None:
    names = seam_names(flat.schema)
    if not names:
        return None
    shape = (flat.extent.steps, flat.extent.batch, -1)
    firsts, lasts = (
        [tensors[f"{field}.{name}"].reshape(shape)[at] for name in names]
        for field, at in (("curr_obs", 0), ("next_obs", -1))
    )
    return Seam(row_keys([*firsts]), row_keys([*lasts]), number)


def iterate_rlinf(found: RLinfSource) -> Iterator[tuple[str, FlatTrajectory | CorruptStoreError | UnsafeContentError]]:
    """Yield the name of every present file with its trajectory or its error."""
    for row, entry in enumerate(found.entries):
        name = entry.file_name(found.suffix)
        try:
            yield name, found.flat(row)
        except (CorruptStoreError, UnsafeContentError) as error:
            yield name, error
