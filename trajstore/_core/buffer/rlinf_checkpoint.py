"""Writing directories that RLinf reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.portions import portions
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.parallel import in_order
from trajstore._core.store.index import TrajectoryEntry
from trajstore._core.store.log_records import ids_in_words
from trajstore._core.store.rlinf_layout import INDEX_NAMES, RLinfEntry, encode_trajectory, index_json, metadata_json
from trajstore._core.store.sealed import METADATA_NAME
from trajstore.errors import counted

logger = logging.getLogger(__name__)

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

    RLinf has no field ``valid``: it is left out, with a warning where steps are invalid.

    Raises:
        ConfigurationError: there is an agent trajectory.
    """
    suffix = "pkl" if trajectory_format == "pkl" else "pt"

    invalid: dict[int, int] = {}

    def write(group: list[tuple[TrajectoryEntry, FlatTrajectory]]) -> list[RLinfEntry]:
        for known, flat in group:
            if flat.num_samples < flat.extent.steps * flat.extent.batch and flat.schema.kind == "step":
                invalid[known.trajectory_id] = flat.extent.steps * flat.extent.batch - flat.num_samples
        encoded = [encode_trajectory(flat, known.trajectory_id, suffix) for known, flat in group]
        target.publish([file for _, file in encoded])  # the folder is synced once for all of them
        return [entry for entry, _ in encoded]

    groups = (
        group for group, _ in portions(trajectories, _GROUP_BYTES, lambda item: item[1].nbytes, most=_GROUP_FILES)
    )
    entries = [entry for group in in_order(write, groups) for entry in group]
    if invalid:
        logger.warning(
            "layout 'rlinf': RLinf has no field valid and will also draw %s of %s (%s)",
            counted(sum(invalid.values()), "invalid step"),
            counted(len(invalid), "trajectory"),
            ids_in_words(np.array(list(invalid))),
        )
    target.publish([EncodedFile(INDEX_NAMES[0], [index_json(entries)])])
    target.publish([EncodedFile(METADATA_NAME, [metadata_json(entries, trajectory_counter, seed, suffix)])])
