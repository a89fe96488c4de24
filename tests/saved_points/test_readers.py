"""Readers and samplers during a rollback see the state before or after it, never a mixture."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.saved_points.stores import add, make
from trajstore import TrajectoryReplayBuffer


def with_a_point(path: Path) -> TrajectoryReplayBuffer:
    """Return a buffer with point 1 after four trajectories."""
    buffer = make(path)
    add(buffer, range(4))
    buffer.points.save(1)
    return buffer


def test_refresh_of_a_points_reader_tells_of_commits_and_draws_on(tmp_path: Path) -> None:
    with (
        with_a_point(tmp_path) as buffer,
        TrajectoryReplayBuffer.open(tmp_path, pin="step-1", seed=5) as reader,
        TrajectoryReplayBuffer.open(tmp_path, pin="step-1", seed=5) as still,
    ):
        assert not reader.refresh()
        add(buffer, range(4, 8))
        buffer.evict([0])
        assert reader.refresh()
        assert reader.trajectory_ids.tolist() == [0, 1, 2, 3]
        assert not reader.refresh()
        assert torch.equal(reader.sample(8)["rewards"], still.sample(8)["rewards"])
