"""Steps that Stable-Baselines3, TorchRL, Minari and LeRobot collect, against a calculation with NumPy alone.

The environment notes each of its steps. Rows, n-step returns and sequences of a store must be those of its notes; the
code of the calculation shares nothing with trajstore.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from tests.support.equality import same
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer.sequences import sample_n_step, sample_sequences

pytestmark = pytest.mark.campaign

COUNT, STEPS, GAMMA, LENGTH = 3000, 5, 0.9, 6
STATE, FORCE, IMAGE = "joints", "force", "image"
Arrays = dict[str, Any]


@dataclass
class Step:
    """A step as the environment saw it. The first number of its state identifies it."""

    before: Arrays
    after: Arrays
    action: Any
    reward: float
    terminated: bool
    truncated: bool


class Robot(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 12 steps, which end by termination, truncation, or both at once."""

    def __init__(self, number: int = 0, names: Sequence[str] = (STATE, FORCE, IMAGE)) -> None:
        self._random, self._code = np.random.default_rng(number), number * 1_000_000
        self.episodes: list[list[Step]] = []
        spaces = {
            STATE: Box(-np.inf, np.inf, (3,), np.float32),
            FORCE: Box(-np.inf, np.inf, (2, 2), np.float16),
            IMAGE: Box(0, 255, (3, 36, 36), np.uint8),
        }
        self.observation_space = Dict({name: spaces[name] for name in names})
        self.action_space = Box(-1, 1, (2,), np.float32)

    def _observe(self) -> Arrays:
        self._code += 1
        values = {
            STATE: np.array([self._code, *self._random.normal(size=2)], np.float32),
            FORCE: self._random.normal(size=(2, 2)).astype(np.float16),
            IMAGE: self._random.integers(0, 256, (3, 36, 36), np.uint8),
        }
        self._now = {name: values[name] for name in self.observation_space}  # type: ignore[attr-defined]
        return dict(self._now)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Arrays, dict[str, Any]]:
        self._left, self._end = self._random.choice([1, 2, 3, 7, 12]), self._random.integers(3)
        self.episodes.append([])
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Arrays, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        ends = self._left == 0
        before, reward = self._now, float(np.float32(self._random.normal()))
        done = (bool(ends and self._end != 1), bool(ends and self._end != 0))
        self.episodes[-1].append(Step(before, self._observe(), np.array(action), reward, *done))
        return dict(self._now), reward, *done, {}


class Recount:
    """Rows, n-step returns and sequences of runs: steps of one environment that are stored one after another."""

    def __init__(self, runs: Iterable[list[Step]], code: str = STATE) -> None:
        self._code = code
        self._at: dict[float, tuple[list[Step], int]] = {}
        for run in runs:
            self._at |= {float(step.before[code][0]): (run, number) for number, step in enumerate(run)}

    def __len__(self) -> int:
        return len(self._at)

    def after(self, code: float, most: int) -> list[Step]:
        """Return a step and those that follow it in its episode and run."""
        run, number = self._at[code]
        steps: list[Step] = []
        for step in run[number : number + most]:
            steps.append(step)
            if step.terminated or step.truncated:
                break
        return steps

    def wrong_rows(self, batch: Any) -> int:
        codes = [float(row["curr_obs"][self._code][0]) for row in rows_of(batch)]
        steps = [self.after(code, 1)[0] for code in codes]
        return sum(not self._is_step(*pair) for pair in zip(steps, rows_of(batch), strict=True))

    def wrong_returns(self, batch: Any) -> int:
        return sum(not self._is_return(row) for row in rows_of(batch))

    def _is_return(self, row: Arrays) -> bool:
        steps = self.after(float(row["curr_obs"][self._code][0]), STEPS)
        total = sum(GAMMA**number * step.reward for number, step in enumerate(steps))
        bootstrap = 0.0 if steps[-1].terminated else GAMMA ** len(steps)
        return (
            row["rewards"] == pytest.approx(total, rel=1e-4, abs=1e-5)
            and row["bootstrap"] == pytest.approx(bootstrap, rel=1e-5)
            and int(row["steps"]) == len(steps)
            and same(row["curr_obs"], steps[0].before)
            and same(row["next_obs"], steps[-1].after)
        )

    def wrong_sequences(self, batch: Any) -> int:
        wrong = 0
        for row in rows_of(batch):
            steps = self.after(float(row["curr_obs"][self._code][0][0]), LENGTH)
            good = row.pop("mask").tolist() == [True] * len(steps) + [False] * (LENGTH - len(steps))
            wrong += not (good and all(self._is_step(step, at(row, i)) for i, step in enumerate(steps)))
        return wrong

    @staticmethod
    def _is_step(step: Step, row: Arrays) -> bool:
        flags = (row["terminations"], row["dones"])
        return (
            same(row["curr_obs"], step.before)
            and same(row["next_obs"], step.after)
            and np.array_equal(row["actions"], step.action)
            and row["rewards"] == np.float32(step.reward)
            and [bool(flag) for flag in flags] == [step.terminated, step.terminated or step.truncated]
        )


def rows_of(batch: Any) -> list[Arrays]:
    def arrays(value: Any) -> Any:
        return {key: arrays(item) for key, item in value.items()} if isinstance(value, dict) else value.numpy()

    whole = arrays(dict(batch))
    return [at(whole, number) for number in range(len(whole["rewards"]))]


def at(value: Any, number: int) -> Any:
    return {key: at(item, number) for key, item in value.items()} if isinstance(value, dict) else value[number]


def check(path: Path, recount: Recount) -> None:
    """Draw 3,000 rows, returns and sequences from a store and count the wrong ones."""
    with TrajectoryReplayBuffer.open(path, seed=5, sample_window_size=0) as reader:
        assert reader.total_samples == len(recount) >= COUNT
        rows = reader.sample(COUNT)
        returns = sample_n_step(reader, COUNT, STEPS, GAMMA)
        padded = sample_sequences(reader, COUNT, LENGTH, pad=True)
        whole = sample_sequences(reader, COUNT, LENGTH)
        assert len(rows["rewards"]) == len(returns["rewards"]) == len(padded["mask"]) == len(whole["mask"]) == COUNT
        assert bool(whole["mask"].all())
        wrong = [recount.wrong_rows(rows), recount.wrong_returns(returns)]
        assert [*wrong, *map(recount.wrong_sequences, (padded, whole))] == [0, 0, 0, 0]


def store(path: Path, trajectories: Iterable[Trajectory], form: str = "pt") -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form) as buffer:
        for trajectory in trajectories:
            buffer.add_trajectories([trajectory])


def steps_of(robots: Iterable[Robot]) -> list[list[Step]]:
    """Return the steps of each robot in order."""
    return [list(itertools.chain(*robot.episodes)) for robot in robots]


def torched(value: Any) -> Any:
    return {key: torch.from_numpy(np.ascontiguousarray(item)) for key, item in value.items()}


def test_stable_baselines3(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from stable_baselines3 import TD3
    from stable_baselines3.common.vec_env import DummyVecEnv

    robots = [Robot(number) for number in range(1, 4)]
    model = TD3(
        "MultiInputPolicy",
        DummyVecEnv([lambda robot=robot: robot for robot in robots]),  # type: ignore[misc]
        buffer_size=3300,
        learning_starts=300,
        train_freq=(400, "step"),
        gradient_steps=1,
        batch_size=8,
    )
    model.learn(1200 * 3)
    replay: Any = model.replay_buffer
    assert replay.full  # the oldest steps were overwritten
    order = np.roll(np.arange(replay.buffer_size), -replay.pos)
    dones, timeouts = (torch.from_numpy(value[order])[..., None].bool() for value in (replay.dones, replay.timeouts))
    trajectory = Trajectory(
        curr_obs=torched({name: values[order] for name, values in replay.observations.items()}),
        next_obs=torched({name: values[order] for name, values in replay.next_observations.items()}),
        actions=torch.from_numpy(replay.actions[order]),
        rewards=torch.from_numpy(replay.rewards[order])[..., None],
        dones=dones,
        terminations=dones & ~timeouts,
        truncations=timeouts,
    )
    store(tmp_path, [trajectory])
    check(tmp_path, Recount(run[-len(order) :] for run in steps_of(robots)))


def test_returns_of_stable_baselines3_agree_with_the_calculation() -> None:
    """The calculation itself is checked by another library's n-step returns."""
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from stable_baselines3.common.buffers import NStepReplayBuffer

    robot = Robot(1, (STATE,))
    space = robot.observation_space[STATE]  # type: ignore[index]
    replay = NStepReplayBuffer(4000, space, robot.action_space, n_steps=STEPS, gamma=GAMMA)
    before = None
    for _ in range(3500):
        now = robot.reset()[0][STATE] if before is None else before
        after, reward, terminated, truncated, _ = robot.step(action := robot.action_space.sample())
        info = [{"TimeLimit.truncated": truncated and not terminated}]
        done = terminated or truncated
        replay.add(now, after[STATE], action, np.array([reward]), np.array([done]), info)
        before = None if done else after[STATE]
    recount, drawn = Recount(steps_of([robot])), replay.sample(COUNT)
    for number in range(COUNT):
        steps = recount.after(float(drawn.observations[number, 0]), STEPS)
        total = sum(GAMMA**at * step.reward for at, step in enumerate(steps))
        assert float(drawn.rewards[number]) == pytest.approx(total, rel=1e-4, abs=1e-5)
        assert bool(drawn.dones[number]) == steps[-1].terminated
        assert np.array_equal(drawn.next_observations[number].numpy(), steps[-1].after[STATE])


def blocks_of_torchrl(robots: Sequence[Robot]) -> Iterable[Any]:
    from torchrl.collectors import SyncDataCollector
    from torchrl.envs import GymWrapper, SerialEnv

    makers = [lambda robot=robot: GymWrapper(robot) for robot in robots]  # type: ignore[misc]
    environment = SerialEnv(len(robots), makers)
    collector = SyncDataCollector(environment, None, frames_per_batch=600, total_frames=3600)
    yield from collector
    collector.shutdown()


def of_tensordict(block: Any, **more: Any) -> Trajectory:
    """Return a block ``[T, B]`` as a trajectory, as a user would write it."""
    names = (STATE, FORCE, IMAGE)
    return Trajectory(
        curr_obs=block.select(*names),
        next_obs=block["next"].select(*names),
        actions=block["action"],
        rewards=block["next", "reward"],
        dones=block["next", "done"],
        terminations=block["next", "terminated"],
        truncations=block["next", "truncated"],
        **more,
    )


@pytest.mark.parametrize("split", [False, True])
def test_torchrl(tmp_path: Path, split: bool) -> None:
    pytest.importorskip("torchrl", reason="torchrl is not installed")
    from torchrl.collectors.utils import split_trajectories

    robots = [Robot(number) for number in range(1, 4)]
    trajectories, runs = [], list[list[Step]]()
    for block in blocks_of_torchrl(robots):
        if split:  # a padded row for each piece of an episode
            pieces = split_trajectories(block.clone()).transpose(0, 1)
            trajectories.append(of_tensordict(pieces, valid=pieces["collector", "mask"]))
        else:
            trajectories.append(of_tensordict(block.transpose(0, 1)))
    for run in steps_of(robots):
        runs += [run[begin : begin + 200] for begin in range(0, 1200, 200)]
    store(tmp_path, trajectories)
    check(tmp_path, Recount(runs))


def of_episode(observations: Arrays, actions: Any, rewards: Any, terminations: Any, truncations: Any) -> Trajectory:
    """Return an episode, whose observations have one row more than its steps, as a trajectory ``[T, 1]``."""

    def column(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values))[:, None]

    return Trajectory(
        curr_obs={name: column(values[:-1]) for name, values in observations.items()},
        next_obs={name: column(values[1:]) for name, values in observations.items()},
        actions=column(actions),
        rewards=column(np.float32(rewards))[..., None],
        terminations=column(terminations)[..., None],
        truncations=column(truncations)[..., None],
        dones=column(np.logical_or(terminations, truncations))[..., None],
    )


def acted(robot: Robot, reset: Callable[[], Any], step: Callable[[Any], Any], least: int) -> None:
    """Act at random until a number of steps was made and an episode has ended."""
    count = 0
    while count < least:
        reset()
        done = False
        while not done:
            _, _, terminated, truncated, _ = step(robot.action_space.sample())
            done, count = terminated or truncated, count + 1


def test_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="minari is not installed")
    pytest.importorskip("jax", reason="jax, which minari's DataCollector uses, is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    gymnasium.register("Robot-v0", f"{__name__}:Robot")
    environment = gymnasium.make("Robot-v0", number=1, disable_env_checker=True)
    robot: Any = environment.unwrapped
    collector = minari.DataCollector(environment)
    acted(robot, collector.reset, collector.step, COUNT)
    assert collector.create_dataset("robot/random-v0", eval_env=environment).total_steps >= COUNT
    episodes = minari.load_dataset("robot/random-v0").iterate_episodes()
    store(
        tmp_path / "store",
        (of_episode(e.observations, e.actions, e.rewards, e.terminations, e.truncations) for e in episodes),
    )
    check(tmp_path / "store", Recount(robot.episodes))


FRAME = {STATE: "observation.state", FORCE: "observation.environment_state", IMAGE: "observation.images.top"}
"""LeRobot's names of the observations."""


def lerobot_file(path: Path, episodes: Sequence[list[Step]]) -> None:
    """Write a file of frames in LeRobot's columns; images are encoded as PNG."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    def encoded(image: Any) -> dict[str, Any]:
        Image.fromarray(np.moveaxis(image, 0, -1)).save(file := BytesIO(), "png")
        return {"bytes": file.getvalue(), "path": None}

    steps = [(e, frame, step) for e, episode in enumerate(episodes) for frame, step in enumerate(episode)]
    columns = {
        "observation.state": [step.before[STATE].tolist() for *_, step in steps],
        "observation.environment_state": [step.before[FORCE].reshape(-1).tolist() for *_, step in steps],
        "observation.images.top": [encoded(step.before[IMAGE]) for *_, step in steps],
        "action": [step.action.tolist() for *_, step in steps],
        "next.reward": [step.reward for *_, step in steps],
        "next.done": [step.terminated or step.truncated for *_, step in steps],
        "next.success": [step.terminated for *_, step in steps],
        "episode_index": [episode for episode, *_ in steps],
        "frame_index": [frame for _, frame, _ in steps],
        "index": list(range(len(steps))),
    }
    parquet.write_table(pyarrow.table(columns), path)


def of_lerobot(path: Path) -> Iterable[Trajectory]:
    """Yield the episodes of a file; the last frame has no next observation, so it is repeated."""
    import pandas
    from PIL import Image

    for _, frames in pandas.read_parquet(path).groupby("episode_index"):
        frames = frames.sort_values("frame_index")
        images = [np.asarray(Image.open(BytesIO(image["bytes"]))) for image in frames["observation.images.top"]]
        observations = {
            "observation.state": np.stack(frames["observation.state"]).astype(np.float32),
            "observation.environment_state": np.stack(frames["observation.environment_state"]).astype(np.float16),
            "observation.images.top": np.moveaxis(np.stack(images), -1, 1),
        }
        observations = {key: np.concatenate([value, value[-1:]]) for key, value in observations.items()}
        dones, successes = frames["next.done"].to_numpy(), frames["next.success"].to_numpy()
        trajectory = of_episode(
            observations, np.stack(frames["action"]).astype(np.float32), frames["next.reward"], successes, dones
        )
        trajectory.forward_inputs = {
            name: torch.from_numpy(frames[name].to_numpy().copy())[:, None, None] for name in ("frame_index", "index")
        }
        yield trajectory


@pytest.mark.parametrize("form", ["pt", "pkl", "zarr"])
def test_lerobot(tmp_path: Path, form: str) -> None:
    for package in ("pandas", "pyarrow", "PIL"):
        pytest.importorskip(package, reason=f"{package}, which reads LeRobot's files, is not installed")
    robot = Robot(1)
    acted(robot, robot.reset, robot.step, COUNT)
    lerobot_file(tmp_path / "file.parquet", robot.episodes)
    store(tmp_path / "store", of_lerobot(tmp_path / "file.parquet"), form)

    def named(values: Arrays) -> Arrays:
        return {FRAME[name]: value.reshape(-1) if name == FORCE else value for name, value in values.items()}

    for episode in robot.episodes:
        for number, step in enumerate(episode):
            step.before = named(step.before)
            step.after = step.before if number == len(episode) - 1 else named(step.after)
    check(tmp_path / "store", Recount(robot.episodes, FRAME[STATE]))
    with TrajectoryReplayBuffer.open(tmp_path / "store", seed=5) as reader:
        some = reader.sample(64, columns=["curr_obs.observation.state", "forward_inputs.frame_index"])
        frames = {float(step.before[FRAME[STATE]][0]): at for run in robot.episodes for at, step in enumerate(run)}
        codes = some["curr_obs"]["observation.state"][:, 0].tolist()
        assert some["forward_inputs"]["frame_index"][:, 0].tolist() == [frames[code] for code in codes]
