"""Reports on directories written by RLinf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore._core.files.base import Directory
from trajstore._core.reading.rlinf_source import OR_WITHOUT_IT, RLinfSource
from trajstore.errors import CorruptStoreError, UnsafeContentError
from trajstore.operations.measure import add_block
from trajstore.operations.statistics import Facts, RewardStatistics, columns_report, ids_report
from trajstore.operations.verification import Progress

Report = dict[str, Any]

MISSING = "named by the index, but missing"


def inspect_rlinf(directory: Directory, measure: int, progress: Progress | None) -> tuple[Report, Facts]:
    """Return the report of :func:`trajstore.operations.inspect.inspect` on a directory of RLinf, and its facts."""
    source = RLinfSource.open(directory, strict=False)
    missing = source.missing
    entries = sorted([*source.entries, *missing], key=lambda entry: entry.trajectory_id)
    sizes = directory.sizes()
    ids = np.array([entry.trajectory_id for entry in entries], np.int64)
    problems = [
        *(str(damage).removeprefix(f"{directory.url}/") for damage in source.damaged),
        *(f"{e.file_name(source.suffix)}: {MISSING}" for e in source.gone),
    ]
    facts = Facts(
        {
            **{
                name: np.array([entry.shape[axis] for entry in entries if len(entry.shape) > 1])
                for name, axis in (("steps", 0), ("batch", 1))
            },
            "max_episode_length": np.array([e.max_episode_length for e in entries if e.max_episode_length > 0]),
        },
        weights={entry.model_weights_id for entry in source.entries},
    )
    measured, columns = _measure(source, facts, measure, progress, problems)
    return {
        "kind": "rlinf",
        "path": directory.url,
        "trajectories": len(entries),
        "samples": sum(entry.num_samples for entry in entries),
        "files": len(sizes),
        "size_on_disk": sum(sizes.values()),
        "format": source.metadata.get("trajectory_format"),
        "next_id": source.metadata.get("trajectory_counter"),
        "ids": ids_report(ids, without_file=len(missing)),
        "measured": measured,
        "columns": columns,
        "integrity": {"problems": problems},
    }, facts


def _measure(
    source: RLinfSource, facts: Facts, count: int, progress: Progress | None, problems: list[str]
) -> tuple[int, list[Report]]:
    """Read the newest trajectories whole: RLinf's files have no separate columns. Unreadable ones are problems.

    Returns:
        The number of readable ones, and a report on their columns.
    """
    first = max(0, len(source.entries) - count) if count else 0
    facts.rewards = RewardStatistics(whole=not first)
    versions: list[tuple[int, int]] = []
    columns: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    measured = 0
    for row in range(first, len(source.entries)):
        if progress is not None:
            progress(row + 1 - first, len(source.entries) - first)
        try:
            flat = source.flat(row)
        except (CorruptStoreError, UnsafeContentError) as error:
            problems.append(str(error).removeprefix(f"{source.directory.url}/").removesuffix(OR_WITHOUT_IT))
            continue
        measured += 1
        tensors = dict(zip((column.name for column in flat.schema.columns), flat.tensors, strict=True))
        for column in flat.schema.columns:
            columns[column.name, column.dtype, column.row_shape] += tensors[column.name].nbytes
        steps, batch = flat.extent.steps, flat.extent.batch
        blocks: dict[str, torch.Tensor] = {
            name: tensors[name].reshape(tensors[name].shape[0] // batch, batch, -1)
            for name in {"rewards", "dones"} & {*tensors}
            if batch
        }

        def rows(name: str, start: int, stop: int, tensors: Mapping[str, Any] = tensors, n: int = steps * batch) -> Any:
            return tensors[name].reshape(n, -1)[start:stop]

        add_block(facts.rewards, source.entries[row].trajectory_id, flat.schema, flat.extent, blocks, rows)
        versions += [] if flat.versions is None else [flat.versions]
    facts.without_version = measured - len(versions)
    for name, side in (("version_low", 0), ("version_high", 1)):
        facts.values[name] = np.array([pair[side] for pair in versions], np.int64)
    return measured, columns_report(columns)
