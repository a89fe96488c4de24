"""A buffer with ``auto_save=False``: limits, and what has left memory is never drawn."""

from __future__ import annotations

import pytest

from trajstore import TrajectoryReplayBuffer, errors
from trajstore.testing.witness import check_batch, check_trajectory, witness


def drawn_keys(buffer: TrajectoryReplayBuffer) -> set[int]:
    """Return the keys of all trajectories that can be drawn."""
    whole = [check_trajectory(item) for item in buffer.sample_trajectories(1000)]
    assert len(set(whole)) == len(whole)
    sampled = {key for _ in range(8) for key in check_batch(buffer.sample(64)).tolist()}
    assert sampled <= set(whole)
    return set(whole)


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


def test_fewer_bytes_reach_no_lost_trajectory() -> None:
    small = TrajectoryReplayBuffer(cache_bytes=20_000)
    small.add_trajectories([witness(key) for key in range(100)])
    keys = drawn_keys(small)
    assert keys == set(range(min(keys), 100))
    assert 0 < small.get_stats()["cache_bytes"] <= 20_000
    assert len(small) == 100
