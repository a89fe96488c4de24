"""Writing directories that RLinf reads."""

from __future__ import annotations

from collections.abc import Iterable

from trajstore.core.columns.flat import FlatTrajectory
from trajstore.core.columns.portions import portions
from trajstore.core.files.base import Directory, EncodedFile
from trajstore.core.files.parallel import in_order
from trajstore.core.store.index import TrajectoryEntry
from trajstore.core.store.rlinf_layout import (
    INDEX_NAMES,
    RLinfEntry,
    encode_trajectory,
    index_json,
    metadata_json,
)
from trajstore.core.store.sealed import METADATA_NAME

_GROUP_BYTES, _GROUP_FILES = 8 << 20, 64
"""Bytes and files written at a time."""


def write_rlinf(
    target: Directory,
    trajectories: Iterable[tuple[TrajectoryEntry, FlatTrajectory]],
    trajectory_counter: int,
    seed: int | None,
    trajectory_format: str,
) -> None:
    """Write a directory that RLinf reads; formats that RLinf does not know are written as ``pt``.

    Raises:
        ConfigurationError: there is an agent trajectory.
    """
    suffix = "pkl" if trajectory_format == "pkl" else "pt"

    def write(group: list[tuple[TrajectoryEntry, FlatTrajectory]]) -> list[RLinfEntry]:
        encoded = [encode_trajectory(flat, known.trajectory_id, suffix) for known, flat in group]
        target.publish([file for _, file in encoded])  # the folder is synced once for all of them
        return [entry for entry, _ in encoded]

    groups = (
        group for group, _ in portions(trajectories, _GROUP_BYTES, lambda item: item[1].nbytes, most=_GROUP_FILES)
    )
    entries = [entry for group in in_order(write, groups) for entry in group]
    target.publish([EncodedFile(INDEX_NAMES[0], [index_json(entries)])])
    target.publish([EncodedFile(METADATA_NAME, [metadata_json(entries, trajectory_counter, seed, suffix)])])
