"""A sampler restored from a saved point draws like the uninterrupted run, whenever it last drew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sampling.makers import SAMPLERS
from tests.stores import opened
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore.samplers import Sampler, WeightedSampler


def rollout(version: int) -> Trajectory:
    return Trajectory(rewards=torch.full((3, 2, 1), float(version)), versions=torch.full((3, 2, 1), float(version)))


class Run:
    """Adds rollouts and draws by each sampler; drawn rollouts get a priority that grows with their version."""

    def __init__(self, path: Path, where: str | None) -> None:
        self.buffer: TrajectoryReplayBuffer = opened(path, seed=1)
        self.where = where
        self.samplers = {name: make() for name, make in SAMPLERS.items()}
        self.version = 0

    def add(self) -> None:
        self.buffer.add_trajectories([rollout(self.version)])
        self.buffer.evict(self.buffer.trajectory_ids[:-6].tolist())
        self.version += 1

    def draw(self) -> dict[str, list[Any]]:
        return {name: self._drawn_by(sampler) for name, sampler in self.samplers.items()}

    def _drawn_by(self, sampler: Sampler) -> list[Any]:
        if sampler.unit == "trajectory":
            return [
                float(trajectory.rewards[0, 0, 0])
                for trajectory in self.buffer.sample_trajectories(2, sampler=sampler, where=self.where)
            ]
        batch = self.buffer.sample(64, sampler=sampler, where=self.where)
        rewards: list[float] = batch["rewards"].flatten().tolist()
        if isinstance(sampler, WeightedSampler) and sampler.priorities is not None:
            self.buffer.update_priorities(sampler, batch.drawn, torch.tensor(rewards) + 2.0)
        return [rewards, None if batch.weights is None else batch.weights.tolist()]


@pytest.mark.parametrize(("drawn", "undrawn"), [(0, 1), (2, 0), (9, 3)])
@pytest.mark.parametrize("where", [None, "version_high % 3 < 2"])
def test_a_resumed_sampler_draws_on_as_if_nothing_had_happened(
    tmp_path: Path, where: str | None, drawn: int, undrawn: int
) -> None:
    runs = []
    for killed in (False, True):
        run = Run(tmp_path / f"{killed}", where)
        for _ in range(drawn):
            run.add()
            run.draw()
        for _ in range(undrawn):
            run.add()
        run.buffer.points.save(0, state=run.samplers)
        if killed:
            then = run.version
            for _ in range(3):
                run.add()
                run.draw()
            run.buffer.close()
            run = Run(tmp_path / f"{killed}", where)
            state = run.buffer.points.rollback(0, aside=False)
            for name, sampler in run.samplers.items():
                sampler.follow(run.buffer, where=where)
                sampler.load_state_dict(state[name])
            run.version = then
        batches = []
        for _ in range(4):
            run.add()
            batches.append(run.draw())
        run.buffer.close()
        runs.append(batches)
    assert runs[0] == runs[1]
