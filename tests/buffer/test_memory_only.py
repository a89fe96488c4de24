"""A buffer with ``auto_save=False``: limits, and what has left memory is never drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from trajstore import Retention, TrajectoryReplayBuffer, errors
from trajstore.testing.witness import check_batch, check_trajectory, key_of, witness


def drawn_keys(buffer: TrajectoryReplayBuffer) -> set[int]:
    """Return the keys of all trajectories that can be drawn."""
    whole = [check_trajectory(item) for item in buffer.sample_trajectories(1000)]
    assert len(set(whole)) == len(whole)
    sampled = {key for _ in range(8) for key in check_batch(buffer.sample(64)).tolist()}
    assert sampled <= set(whole)
    return set(whole)


def test_retention_holds_after_each_call() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=3, retention=Retention(max_trajectories=4))
    for key in range(10):
        buffer.add_trajectories([witness(key)])
        assert buffer.trajectory_ids.tolist() == list(range(max(0, key - 3), key + 1))
        assert drawn_keys(buffer) == set(range(max(0, key - 2), key + 1))
    buffer.add_trajectories([witness(key) for key in range(10, 20)])
    assert buffer.trajectory_ids.tolist() == [16, 17, 18, 19]
    with pytest.raises(errors.TrajectoryUnavailableError, match="no trajectory"):
        buffer.get(15)


def test_evicting_recent_trajectories_does_not_open_the_window_to_lost_ones() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=3)
    buffer.add_trajectories([witness(key) for key in range(6)])
    buffer.evict([4, 5])
    assert drawn_keys(buffer) == {3}
    assert buffer.trajectory_ids.tolist() == [0, 1, 2, 3]  # counted still, as RLinf does
    buffer.add_trajectories([witness(6)])
    assert drawn_keys(buffer) == {3, 6}
    buffer.evict([3, 6])
    for draw in (buffer.sample, buffer.sample_trajectories):
        with pytest.raises(errors.EmptyBufferError, match=r"all 3 trajectories .* have left it"):
            draw(1)


def test_a_wider_window_or_fewer_bytes_reach_no_lost_trajectory() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=2)
    buffer.add_trajectories([witness(key) for key in range(6)])
    buffer.sample_window_size = 0
    assert drawn_keys(buffer) == {4, 5}
    small = TrajectoryReplayBuffer(cache_bytes=20_000)
    small.add_trajectories([witness(key) for key in range(100)])
    keys = drawn_keys(small)
    assert keys == set(range(min(keys), 100))
    assert 0 < small.get_stats()["cache_bytes"] <= 20_000
    assert len(small) == 100


@pytest.mark.parametrize("fmt", ["pt", "pkl"])
def test_what_was_loaded_is_drawn_across_those_that_were_lost(tmp_path: Path, fmt: str) -> None:
    source = TrajectoryReplayBuffer(trajectory_format=fmt)
    source.add_trajectories([witness(key) for key in range(4)])
    source.save_checkpoint(tmp_path / "checkpoint")
    buffer = TrajectoryReplayBuffer(sample_window_size=5)
    buffer.load_checkpoint(tmp_path / "checkpoint")
    buffer.add_trajectories([witness(key) for key in range(4, 12)])
    assert drawn_keys(buffer) == {7, 8, 9, 10, 11}
    buffer.evict([9, 10, 11])
    assert drawn_keys(buffer) == {1, 2, 3, 7, 8}
    buffer.sample_window_size = 2
    assert drawn_keys(buffer) == {7, 8}
    buffer.save_checkpoint(tmp_path / "second")
    again = TrajectoryReplayBuffer(sample_window_size=0)
    again.load_checkpoint(tmp_path / "second")
    assert [key_of(again.get(number)) for number in again.trajectory_ids.tolist()] == [0, 1, 2, 3, 7, 8]
