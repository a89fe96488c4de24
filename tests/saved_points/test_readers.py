"""Readers and samplers during a rollback see the state before or after it, never a mixture."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.saved_points.stores import add, keys_of, make
from tests.stores import reader_of
from trajstore import TrajectoryReplayBuffer
from trajstore.samplers import EpochSampler


def with_a_point(path: Path) -> TrajectoryReplayBuffer:
    """Return a buffer with point 1 after four trajectories."""
    buffer = make(path)
    add(buffer, range(4))
    buffer.points.save(1)
    return buffer


def test_a_follower_shows_what_was_before_until_it_refreshes(tmp_path: Path) -> None:
    with with_a_point(tmp_path) as buffer:
        add(buffer, range(4, 8))
        follower = reader_of(tmp_path)
        buffer.points.rollback(1, aside=False)
        buffer.compact()
        assert len(keys_of(follower)) == 8, "its lease keeps deleted shards"
        assert follower.refresh()
        assert keys_of(follower) == {number: number for number in range(4)}
        add(buffer, [9])
        assert follower.refresh()
        assert list(keys_of(follower)) == [0, 1, 2, 3, 8]
        assert not follower.refresh()
        follower.close()


def test_a_sampler_that_follows_the_buffer_hears_of_a_rollback(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        sampler = EpochSampler(unit="trajectory")
        add(buffer, range(4))
        buffer.points.save(1, {"sampler": sampler})
        buffer.evict([0])
        add(buffer, range(4, 8))
        buffer.sample_trajectories(2, sampler=sampler)
        assert sorted(sampler.ids.tolist()) == list(range(1, 8))
        sampler.load_state_dict(buffer.points.rollback(1)["sampler"])
        drawn = buffer.sample_trajectories(4, sampler=sampler)
        assert sorted(sampler.ids.tolist()) == [0, 1, 2, 3]
        assert sorted(int(trajectory.rewards[0, 0, 0]) // 1000 for trajectory in drawn) == [0, 1, 2, 3]


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
