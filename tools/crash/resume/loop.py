"""A training loop that is repeatable to the bit: what it adds, draws and learns depends on nothing but its seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore.loader import ReplayLoader
from trajstore.samplers import EpochSampler, Priorities, UseLimit, WeightedSampler

EVERY = 3
"""Steps between two checkpoints."""

_WINDOW = 12  # trajectories that stay; older ones are evicted
_WIDTH = 5
_BATCH = 16


class Loop:
    """A model, a store that it writes, samplers, and a loader over demonstrations; begins or resumes in a folder.

    Args:
        folder: of store, demonstrations and model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rollouts = torch.Generator().manual_seed(5)
        self.weights = torch.zeros(_WIDTH, dtype=torch.float64)
        self.step = 0
        self.digests: list[str] = []
        """Of each step's batches and of the model after it."""
        self.buffer = TrajectoryReplayBuffer(
            seed=7, auto_save=True, auto_save_path=folder / "store", sample_window_size=0
        )
        self._demos = TrajectoryReplayBuffer(seed=11, sample_window_size=0)
        self._demos.load_checkpoint(_demonstrations(folder / "demos"))
        self._prioritized = WeightedSampler([UseLimit(max_uses=40, cooldown=1)], Priorities())
        self._epochs = EpochSampler()
        self._loader = ReplayLoader(self._demos, _BATCH, prefetch=3)
        if (folder / "model.pt").exists():
            model = torch.load(folder / "model.pt")
            self.step, self.weights, self.digests = model["step"], model["weights"], model["digests"]
        if not self.buffer.points.saved:
            self.buffer.points.save(0)
        if state := self.buffer.points.rollback(self.step):
            self._take_up(state)

    def _take_up(self, state: dict[str, Any]) -> None:
        self._rollouts.set_state(state["rollouts"])
        for sampler, name in ((self._prioritized, "prioritized"), (self._epochs, "epochs")):
            sampler.follow(self.buffer)
            sampler.load_state_dict(state[name])
        self._loader.load_state_dict(state["loader"])

    def train_step(self) -> None:
        """Add a trajectory that depends on the model, evict the oldest, and learn from four batches."""
        seen = torch.rand(4, 2, _WIDTH, generator=self._rollouts, dtype=torch.float64) + self.weights
        self.buffer.add_trajectories([Trajectory(rewards=seen.sum(-1, keepdim=True), curr_obs={"x": seen})])
        self.buffer.flush()
        if len(self.buffer) > _WINDOW:
            self.buffer.evict(self.buffer.trajectory_ids[:-_WINDOW].tolist())
        drawn = self.buffer.sample(_BATCH, sampler=self._prioritized)
        others = self.buffer.sample(_BATCH, sampler=self._epochs), self.buffer.sample(_BATCH), next(self._loader)
        digest = hashlib.sha256()
        for batch in (drawn, *others):
            inputs, targets = batch["curr_obs"]["x"], batch["rewards"]
            errors = (inputs @ self.weights)[:, None] - targets
            self.weights = self.weights - 0.01 * (errors * inputs).mean(0)
            digest.update(inputs.numpy().tobytes())
        assert drawn.weights is not None
        digest.update(drawn.weights.numpy().tobytes())
        errors = drawn["curr_obs"]["x"] @ self.weights - drawn["rewards"][:, 0]
        self.buffer.update_priorities(self._prioritized, drawn.drawn, errors.abs())
        digest.update(self.weights.numpy().tobytes())
        self.digests.append(digest.hexdigest())
        self.step += 1

    def save_point(self) -> None:
        """Save the store's part of a checkpoint."""
        parts = {"prioritized": self._prioritized, "epochs": self._epochs, "loader": self._loader}
        self.buffer.points.save(self.step, state={**parts, "rollouts": self._rollouts.get_state()})

    def save_model(self) -> None:
        """Save the model's part, whole or not at all."""
        model = {"step": self.step, "weights": self.weights, "digests": self.digests}
        torch.save(model, self._folder / "model.tmp")
        os.replace(self._folder / "model.tmp", self._folder / "model.pt")

    def die_while_reading(self, die: Callable[[], None]) -> None:
        """Call ``die`` from the loader's thread, while it reads the next batch."""

        def read(*_arguments: Any, **_options: Any) -> Any:
            die()

        setattr(self._demos, "read", read)  # noqa: B010  # mypy sees no assignment to a method
        for _ in range(8):  # more than it has made ahead
            next(self._loader)

    def close(self) -> None:
        """Close loader and buffers."""
        self._loader.close()
        self._demos.close()
        self.buffer.close()


def _demonstrations(path: Path) -> Path:
    """Make the store of demonstrations unless it is there whole."""
    with TrajectoryReplayBuffer(seed=13, auto_save=True, auto_save_path=path) as demos:
        for number in range(len(demos), 8):
            generator = torch.Generator().manual_seed(17 + number)
            seen = torch.rand(4, 2, _WIDTH, generator=generator, dtype=torch.float64)
            demos.add_trajectories([Trajectory(rewards=seen.sum(-1, keepdim=True), curr_obs={"x": seen})])
            demos.flush()
    return path
