"""CartPole from replay: rollouts go to disk and a learner samples them; both can be stopped at any time.

Directory of a run::

    replay/      the store: every transition ever made
    learner.pt   the learner's newest checkpoint, replaced atomically; the store has a saved point of its round
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from examples.cartpole.dqn import DQNLearner
from examples.common import DemoSettings, Progress, one_thread, read_checkpoint, write_checkpoint
from trajstore import ChunkStepResult, EmbodiedRolloutResult, Trajectory, TrajectoryReplayBuffer
from trajstore.errors import MissingDependencyError, trajectories
from trajstore.samplers import WeightedSampler, sampler_of

if TYPE_CHECKING:
    import gymnasium

REPLAY_FOLDER = "replay"
LEARNER_FILE = "learner.pt"

ENVIRONMENTS = 16  # B
STEPS = 16  # T, per round
UPDATES_PER_ROUND = 32
BATCH_SIZE = 256
WARM_UP_ROUNDS = 2  # rollouts before the first update
EXPLORATION_ROUNDS = 20  # during which exploration falls from 1 to its floor
EXPLORATION_FLOOR = 0.02
CHECKPOINT_ROUNDS = 10
DEFAULT_UPDATES = 8_000
SOLVED = 475.0  # mean return of the last episodes that Gymnasium calls solved; 500 is the maximum
RECENT_EPISODES = 20

SAMPLERS: Mapping[str, Mapping[str, Any] | None] = {
    "uniform": None,
    "prioritized": {"name": "weighted", "priorities": {"alpha": 0.6, "beta": 0.4}},
    "recency": {"name": "weighted", "recency": {"half_life": 50}},
    "staleness": {"name": "weighted", "staleness": {"max_age": 1600}},
    "epochs": {"name": "epochs"},
}
"""Samplers by name, as for ``sampler_of``; None = the buffer's own."""


class CartPoleRollout:
    """B CartPole environments that continue from one trajectory to the next."""

    def __init__(self, environments: int, seed: int) -> None:
        self._envs = _make_environments(environments)
        states, _ = self._envs.reset(seed=seed)
        self._states = torch.from_numpy(np.asarray(states, np.float32))
        self._returns = np.zeros(environments)
        self.finished: list[float] = []
        """Returns of all finished episodes."""

    @property
    def max_episode_length(self) -> int:
        """Steps after which an episode is truncated."""
        spec = self._envs.spec
        return int(spec.max_episode_steps or 0) if spec is not None else 0

    def collect(self, act: Callable[[torch.Tensor], torch.Tensor], version: int, steps: int) -> Trajectory:
        """Return a trajectory ``[steps, B, ...]``.

        Args:
            act: states ``[B, 4]`` -> actions ``[B]`` int64.
            version: of the acting weights.
            steps: T.
        """
        result = EmbodiedRolloutResult(max_episode_length=self.max_episode_length)
        for _ in range(steps):
            before = self._states
            actions = act(before)
            following, rewards, terminations, truncations, infos = self._envs.step(actions.numpy())
            # Finished environments are reset at once: their final states differ from the new initial ones.
            last = np.array(following, np.float32)
            for number in np.flatnonzero(terminations | truncations):
                last[number] = infos["final_obs"][number]
            self._count(rewards, terminations | truncations)
            self._states = torch.from_numpy(np.array(following, np.float32))
            result.append_step_result(
                ChunkStepResult(
                    actions=actions.unsqueeze(-1),
                    rewards=torch.from_numpy(np.asarray(rewards, np.float32)).unsqueeze(-1),
                    terminations=torch.from_numpy(terminations).unsqueeze(-1),
                    truncations=torch.from_numpy(truncations).unsqueeze(-1),
                    dones=torch.from_numpy(terminations | truncations).unsqueeze(-1),
                    versions=torch.full((len(actions), 1), float(version)),
                )
            )
            result.append_transitions({"states": before}, {"states": torch.from_numpy(last)})
        return result.to_trajectory()

    def _count(self, rewards: np.ndarray[Any, Any], dones: np.ndarray[Any, Any]) -> None:
        self._returns += rewards
        self.finished.extend(self._returns[dones].tolist())
        self._returns[dones] = 0.0

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()


class CartPoleRun:
    """Rollouts, replay and learner of one directory; continues an existing run."""

    def __init__(self, path: Path, seed: int, sampler: str = "uniform") -> None:
        self.sampler_name = sampler
        chosen = SAMPLERS[sampler]
        self._sampler = None if chosen is None else sampler_of(chosen)
        self._checkpoint = path / LEARNER_FILE
        self.replay_path = path / REPLAY_FOLDER
        self._generator = torch.Generator().manual_seed(seed)
        self.learner = DQNLearner(observations=4, actions=2, generator=self._generator)
        self.rounds = 0
        self.first_return: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.resumed = self._load()
        self._rollout = CartPoleRollout(ENVIRONMENTS, seed=seed + self.rounds)
        self.buffer = TrajectoryReplayBuffer(
            seed=seed + self.rounds, sample_window_size=0, auto_save=True, auto_save_path=str(self.replay_path)
        )
        if self.resumed:
            self._take_up(self.buffer.points.rollback(self.rounds))
        else:
            for point in self.buffer.points.saved:  # of a learner that no longer exists
                self.buffer.points.remove(point.step)

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Continue with the sampler of the saved point, if it is the requested one."""
        name, sampler = state["sampler"]
        if self._sampler is not None and name == self.sampler_name:
            self._sampler.follow(self.buffer)
            self._sampler.load_state_dict(sampler)

    @property
    def recent_return(self) -> float | None:
        """Mean return of the newest episodes; None until there are enough."""
        return float(np.mean(self._recent)) if len(self._recent) == RECENT_EPISODES else None

    @property
    def solved(self) -> bool:
        """True if the newest episodes balance the pole nearly to the end."""
        return self.recent_return is not None and self.recent_return >= SOLVED

    def round(self) -> None:
        """Make and store one trajectory, and take the gradient steps of the round."""
        exploration = max(EXPLORATION_FLOOR, 1.0 - self.rounds / EXPLORATION_ROUNDS)
        trajectory = self._rollout.collect(
            lambda states: self.learner.act(states, exploration, self._generator), self.learner.updates, STEPS
        )
        self._recent.extend(self._rollout.finished)
        self._rollout.finished.clear()
        if self.first_return is None:
            self.first_return = self.recent_return
        self.buffer.add_trajectories([trajectory])
        self.rounds += 1
        if self.rounds > WARM_UP_ROUNDS:
            for _ in range(UPDATES_PER_ROUND):
                self._update()
        if self.rounds % CHECKPOINT_ROUNDS == 0:
            self.save()

    def _update(self) -> None:
        if self._sampler is None:
            self.learner.update(self.buffer.sample(BATCH_SIZE))
            return
        batch: Any = self.buffer.sample(BATCH_SIZE, sampler=self._sampler)
        update = self.learner.update(batch, batch.weights)
        if isinstance(self._sampler, WeightedSampler) and self._sampler.priorities is not None:
            self.buffer.update_priorities(self._sampler, batch.drawn, update.errors)

    def save(self) -> None:
        """Make all progress survive a crash: first the store with its sampler, then the learner."""
        sampler = None if self._sampler is None else self._sampler.state_dict()
        self.buffer.points.save(self.rounds, {"sampler": (self.sampler_name, sampler)})
        state = {
            "learner": self.learner.state_dict(),
            "rounds": self.rounds,
            "generator": self._generator.get_state(),
            "recent": list(self._recent),
            "first_return": self.first_return,
        }
        write_checkpoint(self._checkpoint, state)

    def _load(self) -> bool:
        if not self._checkpoint.exists():
            return False
        state = read_checkpoint(self._checkpoint, "remove it to train anew from the replay")
        self.learner.load_state_dict(state["learner"])
        self.rounds = int(state["rounds"])
        self._generator.set_state(state["generator"])
        self._recent.extend(state["recent"])
        self.first_return = state["first_return"]
        return True

    def close(self) -> None:
        """Close buffer and environments."""
        self._rollout.close()
        self.buffer.close()


def run(settings: DemoSettings, say: Callable[[str], None], progress: Progress) -> Path:
    """Train until CartPole is solved or the budget is spent; return the directory of the store.

    Args:
        settings: path, budget and seed. Gradient steps of earlier runs in the same directory count.
        say: prints a sentence.
        progress: called with (gradient steps, budget, note).

    Raises:
        MissingDependencyError: gymnasium is not installed.
        StoreLockedError: another process trains in this directory.
    """
    total = DEFAULT_UPDATES if settings.updates is None else settings.updates
    task = CartPoleRun(settings.path, settings.seed, settings.sampler or "uniform")
    began = time.monotonic()
    try:
        if len(task.buffer):
            learner = f"learner at {task.learner.updates:,} updates" if task.resumed else "a new learner"
            say(f"continuing in {settings.path}: {trajectories(len(task.buffer))} on disk, {learner}")
        with one_thread():
            try:
                while task.learner.updates < total and not task.solved:
                    if settings.seconds is not None and time.monotonic() - began >= settings.seconds:
                        break
                    task.round()
                    recent = task.recent_return
                    progress(min(task.learner.updates, total), total, "" if recent is None else f"return {recent:.0f}")
            finally:
                task.save()  # also after Ctrl-C
        say(_summary(task, total, settings.path))
    finally:
        task.close()
    return task.replay_path


def _summary(task: CartPoleRun, total: int, path: Path) -> str:
    recent, first = task.recent_return, task.first_return
    if recent is None or first is None:
        return (
            f"{task.learner.updates:,} updates: too few episodes for a mean; run again with --path {path} to continue"
        )
    returns = f"{first:.0f} at first, {recent:.0f} after {task.learner.updates:,} updates"
    text = f"mean return of {RECENT_EPISODES} episodes: {returns}"
    if task.solved:
        return text + " (solved)"
    more = f" --updates {2 * total}" if task.learner.updates >= total else ""
    return text + f"; to continue, run again with --path {path}{more}"


def _make_environments(count: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    try:
        import gymnasium
        from gymnasium.vector import AutoresetMode
    except ImportError as error:
        raise MissingDependencyError("gymnasium", "demo") from error
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
