"""A training loop that saves points of the store with its samplers; however often it is killed, its draws repeat."""

from __future__ import annotations

import contextlib
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.support.witness import check_batch, witness
from tools.simulate.judge import BrokenPromiseError, Model
from tools.simulate.work import COLUMNS, Plan, Writer, opened
from trajstore import TrajectoryReplayBuffer
from trajstore.loader import ReplayLoader
from trajstore.samplers import EpochSampler, Priorities, UseLimit, WeightedSampler

_EVERY = 2
"""Steps between two saved points."""
_WINDOW = 4
"""Trajectories that stay; older ones are evicted."""
_DEMONSTRATIONS = range(1, 5)
_FIRST = 64
"""Key of the first trajectory that the loop adds."""


@dataclass
class Trained:
    """The part of a training that is not in the store.

    Attributes:
        step: of the model's newest checkpoint.
        weights: of it; a checksum of everything drawn so far.
        digests: weights after each step that was ever made.
    """

    step: int = 0
    weights: int = 0
    digests: dict[int, int] = field(default_factory=dict)


class Trainer(Writer):
    """The only client that writes; each call is a step, and the first one resumes."""

    trained: Trained
    _weights = 0
    _loader: ReplayLoader | None = None

    def step(self, weights: dict[str, int]) -> None:
        """Add a trajectory that depends on the model, evict the oldest, learn from four batches; save now and then."""
        loader = self._loader or self._resumed()
        self.keys = iter([_FIRST * (self._step + 2) + self._weights % _FIRST])
        self.add()
        self.flush()
        self.evict(self.buffer.trajectory_ids.tolist()[:-_WINDOW])
        drawn = self.buffer.sample(8, sampler=self._prioritized)
        batches = drawn, self.buffer.sample(8, sampler=self._epochs), self.buffer.sample(8), next(loader)
        tags = []
        for batch in batches:
            check_batch(batch)
            tags += batch["curr_obs"]["tag"].flatten().tolist()
        importance = [] if drawn.weights is None else drawn.weights.tolist()
        self._weights = zlib.crc32(repr((self._weights, tags, importance)).encode())
        self.buffer.update_priorities(self._prioritized, drawn.drawn, torch.arange(8) % 3 + 1.0)
        self._step += 1
        if self.trained.digests.setdefault(self._step, self._weights) != self._weights:
            raise BrokenPromiseError(f"a resumed training draws the same: step {self._step} differs")
        if self._step % _EVERY == 0:
            self.save_point(self._step // _EVERY, {**self._samplers(), "loader": loader})
            self.trained.step, self.trained.weights = self._step, self._weights

    def _samplers(self) -> dict[str, EpochSampler | WeightedSampler]:
        return {"prioritized": self._prioritized, "epochs": self._epochs}

    def _resumed(self) -> ReplayLoader:
        """Go back to the point of the model's checkpoint; return the loader of demonstrations."""
        demos = TrajectoryReplayBuffer(seed=2, sample_window_size=0)
        demos.add_trajectories([witness(key, columns=COLUMNS) for key in _DEMONSTRATIONS])
        self._prioritized = WeightedSampler([UseLimit(max_uses=40, cooldown=1)], Priorities())
        self._epochs = EpochSampler()
        self._loader = ReplayLoader(demos, 4, prefetch=2)
        if not self.buffer.points.saved:
            self.save_point(0)
        self._step, self._weights = self.trained.step, self.trained.weights
        if state := self.back(self._step // _EVERY):
            for name, sampler in self._samplers().items():
                sampler.follow(self.buffer)
                sampler.load_state_dict(state[name])
            self._loader.load_state_dict(state["loader"])
        return self._loader

    def close(self) -> None:
        """Close the loader."""
        if self._loader is not None:
            self._loader.close()


def check_training(folder: Path, trained: Trained, plan: Plan) -> None:
    """Repeat the training in a new store without a kill; every step must draw the same.

    Raises:
        BrokenPromiseError: a step differs.
    """
    twin = Trainer(folder, folder / "store", Model(), random.Random(0), lambda: False, lambda text: None)
    twin.trained = Trained(digests=trained.digests)
    twin.alone = contextlib.nullcontext
    with opened(folder, folder / "store", plan) as twin.buffer:
        for _ in trained.digests:
            twin.step({})
        twin.close()
