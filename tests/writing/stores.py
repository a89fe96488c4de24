"""A store of witnesses that is opened, and what it holds when it is opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajstore import TrajectoryReplayBuffer
from trajstore.testing.witness import check_trajectory


def opened(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    """Return a buffer that writes to a path; ``options`` are its own."""
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0, **options)


def contents_of(path: Path) -> list[int]:
    """Return the keys of the witnesses in a store, each compared row by row, in their order."""
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(path)
        return [check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()]
