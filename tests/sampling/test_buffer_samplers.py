"""Samplers through the buffer: rows, additions, evictions, reloads, priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer.sampling import Batch
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError
from trajstore.samplers import EpochSampler, Priorities, Sampler, Staleness, WeightedSampler


def block(key: int, steps: int = 3, batch: int = 2) -> Trajectory:
    """Return a trajectory whose rewards are ``1000 * key + sample``."""
    rewards = 1000.0 * key + torch.arange(steps * batch, dtype=torch.float64).reshape(steps, batch, 1)
    return Trajectory(rewards=rewards, versions=torch.full((steps, batch, 1), float(key)))


def keys(batch: dict[str, torch.Tensor]) -> list[int]:
    return (batch["rewards"].reshape(-1).long() // 1000).tolist()


@pytest.fixture(params=["memory", "disk"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrajectoryReplayBuffer]:
    disk = {"auto_save": True, "auto_save_path": tmp_path / "store"} if request.param == "disk" else {}
    made = TrajectoryReplayBuffer(seed=3, sample_window_size=0, **disk)  # type: ignore[arg-type]
    yield made
    made.close()


def test_priorities_decide_and_come_back_by_row(buffer: TrajectoryReplayBuffer) -> None:
    sampler = WeightedSampler(priorities=Priorities(alpha=1, eps=0))
    buffer.add_trajectories([block(0), block(1)])
    batch = buffer.sample(500, sampler=sampler)
    assert isinstance(batch, Batch)
    errors = torch.where(batch["rewards"].reshape(-1) == 1004, 3.0, 0.0)
    assert buffer.update_priorities(sampler, batch.drawn, errors) == 0
    assert set(buffer.sample(100, sampler=sampler)["rewards"].reshape(-1).tolist()) == {1004.0}
    with TrajectoryReplayBuffer() as other, pytest.raises(ConfigurationError, match="of another buffer"):
        other.update_priorities(WeightedSampler(priorities=Priorities()), batch.drawn, errors)
    buffer.evict([1])
    assert buffer.update_priorities(sampler, batch.drawn, errors) == np.count_nonzero(batch.drawn.ids == 1)


def test_what_has_left_memory_is_not_drawn() -> None:
    buffer = TrajectoryReplayBuffer(seed=0, sample_window_size=3)
    sampler = WeightedSampler()
    for key in range(9):
        buffer.add_trajectories([block(key)])
        assert set(keys(buffer.sample(50, sampler=sampler))) <= {key - 2, key - 1, key}
    assert set(keys(buffer.sample(200, sampler=sampler))) == {6, 7, 8}


def test_agents_by_task_with_a_floor(buffer: TrajectoryReplayBuffer) -> None:
    rollouts = [
        AgentTrajectory(input_ids=torch.tensor([at]), task_id=task, policy_version=version)
        for at, (task, version) in enumerate(
            [("slow", 0), ("slow", 1), ("slow", 2), ("quick", 8), ("quick", 9), ("", 7), ("", 9)]
        )
    ]
    buffer.add_trajectories(rollouts)
    sampler = WeightedSampler([Staleness(1, floor=2)], unit="trajectory")
    drawn = buffer.sample_trajectories(10, sampler=sampler)
    assert sorted(trajectory.input_ids.item() for trajectory in drawn) == [1, 2, 3, 4, 6]  # type: ignore[union-attr]
    assert sampler.figures() == {"eligible_trajectories": 5.0, "starving_tasks": 1.0}


def test_misuse_is_refused(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([block(0), block(1)])
    with pytest.raises(ConfigurationError, match="call sample_trajectories"):
        buffer.sample(2, sampler=WeightedSampler(unit="trajectory"))
    with pytest.raises(ConfigurationError, match="unit='trajectory'"):
        buffer.sample_trajectories(2, sampler=WeightedSampler())
    drawn = buffer.draw(8)
    buffer.evict([0, 1])
    with pytest.raises(TrajectoryUnavailableError, match="has been evicted since"):
        buffer.read(drawn)


@pytest.mark.parametrize("kept", [12, *(pytest.param(kept, marks=pytest.mark.campaign) for kept in (1, 40))])
def test_a_sampler_hears_of_all_that_comes_and_goes_also_when_the_index_moves_its_entries(
    tmp_path: Path, kept: int
) -> None:
    """The index moves entries to its front after a few dozen additions and evictions."""
    sampler = WeightedSampler(unit="trajectory")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, sample_window_size=0) as buffer:
        for key in range(150):
            buffer.add_trajectories([Trajectory(rewards=torch.full((2, 1, 1), float(key)))])
            buffer.flush()
            if len(buffer) > kept:
                buffer.evict(buffer.trajectory_ids[:-kept].tolist())
            buffer.sample_trajectories(3, sampler=sampler)
            assert sampler.ids.tolist() == buffer.trajectory_ids.tolist()


@pytest.mark.parametrize("make", [EpochSampler, lambda: WeightedSampler(priorities=Priorities())])
def test_a_sampler_draws_from_what_was_loaded_in_place_of_another_store_with_the_same_ids(
    tmp_path: Path, make: Callable[[], Sampler]
) -> None:
    sizes = {"long": 40, "short": 2}
    for name, size in sizes.items():
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / name) as buffer:
            buffer.add_trajectories([Trajectory(rewards=torch.full((size, 1, 1), float(size)))] * 3)
    sampler = make()
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        for name in ("long", "short", "long"):
            buffer.load_checkpoint(tmp_path / name)
            places = set()
            for _ in range(60):
                batch = buffer.sample(6, sampler=sampler)
                assert set(batch["rewards"].flatten().tolist()) == {float(sizes[name])}
                places |= set(batch.drawn.samples.tolist())  # type: ignore[attr-defined]
            assert len(places) > sizes[name] // 2
        held = buffer.draw(6, sampler=sampler)
        buffer.load_checkpoint(tmp_path / "short")
        held.samples[:] = sizes["long"] - 1
        with pytest.raises(TrajectoryUnavailableError, match="draw again"):
            buffer.read(held)


@pytest.mark.parametrize("kind", ["restart", "ranks"])
def test_staleness_names_versions_that_begin_again_but_not_other_ranks(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def of(version: int) -> AgentTrajectory:
        return AgentTrajectory(query="q", input_ids=torch.arange(3), policy_version=version)

    sampler = WeightedSampler([Staleness(max_age=8)], unit="trajectory")
    if kind == "restart":
        with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
            for version in (*range(30), *range(5)):
                buffer.add_trajectories([of(version)])
                buffer.sample_trajectories(1, sampler=sampler)
    else:
        for rank in range(2):
            with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / f"rank_{rank}") as writer:
                writer.add_trajectories([of(version) for version in range(40 - 15 * rank)])
        with TrajectoryReplayBuffer.open(tmp_path, sample_window_size=0) as reader:
            reader.sample_trajectories(1, sampler=sampler)
    assert caplog.text.count("a trajectory of version 0 is added after one of 29") == (kind == "restart")
    assert caplog.text.count("began again") == (kind == "restart")
