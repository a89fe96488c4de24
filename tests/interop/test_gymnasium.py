"""Steps of Gymnasium's vector environments against the steps that each environment saw itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from tests.stores import writer_to
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore._core.buffer.sequences import sample_n_step, sample_sequences
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.interop.convert import convert_from, convert_to
from trajstore.interop.gymnasium import VectorSteps
from trajstore.operations.inspect import inspect
from trajstore.samplers import EpochSampler
from trajstore.trajectory import get_model_weights_id

GAMMA = 0.9


class Witness(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes each step of one environment, and puts a number that no other step has into its observation."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=9))
        self.number, self.kind, self.seen = number * 1_000_000, kind, 0
        self.episodes: list[list[tuple[int, int, float, bool]]] = []
        """Code before, code after, reward, terminated, of each step of each episode."""
        codes = gymnasium.spaces.Box(0, 2**31 - 1, (1,), np.int32)
        inner = gymnasium.spaces.Dict({"code": codes, "deep": gymnasium.spaces.Dict({"code": codes})})
        self.observation_space = {"array": codes, "dict": inner, "tuple": gymnasium.spaces.Tuple([codes, codes])}[kind]

    def _observation(self) -> Any:
        self.seen += 1
        code = np.array([self.number + self.seen], np.int32)
        return {"array": code, "dict": {"code": code, "deep": {"code": code}}, "tuple": (code, code)}[self.kind]

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.env.reset(**options)
        self.episodes.append([])
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, _, terminated, truncated, _ = self.env.step(action)
        before, reward = self.number + self.seen, float(self.seen % 13)
        observation = self._observation()
        self.episodes[-1].append((before, before + 1, reward, terminated))
        return observation, reward, terminated, truncated, {}


def code_of(observed: dict[str, Any]) -> torch.Tensor:
    names = [name for name in ("states", "code", "0") if name in observed]
    code: torch.Tensor = observed[names[0]][..., 0]
    if "deep" in observed:
        assert torch.equal(code, observed["deep"]["code"][..., 0])
    if "1" in observed:
        assert torch.equal(code, observed["1"][..., 0])
    return code


def collected(
    mode: AutoresetMode, kind: str, buffer: TrajectoryReplayBuffer, blocks: int = 3, steps: int = 33
) -> list[Witness]:
    """Fill a buffer from four environments that reuse their memory; one full reset cuts the episodes under way."""
    witnesses = [Witness(number, kind) for number in range(1, 5)]
    environment = SyncVectorEnv([lambda w=w: w for w in witnesses], autoreset_mode=mode, copy=False)  # type: ignore[misc]
    result = VectorSteps(environment)
    observations, _ = environment.reset(seed=7)
    result.reset(observations)
    environment.action_space.seed(7)
    for block in range(blocks):
        for number in range(steps):
            actions = environment.action_space.sample()
            result.add(actions, environment.step(actions), prev_values=np.full(4, number, np.float32))
            if mode is AutoresetMode.DISABLED and result.ended.any():
                mask = result.ended
                observations, _ = environment.reset(options={"reset_mask": mask})
                result.reset(observations, mask)
            if (block, number) == (1, 11):
                observations, _ = environment.reset(seed=8)
                result.reset(observations)
        trajectory = result.take(last_values=np.zeros(4, np.float32))
        assert trajectory.prev_values is not None
        assert (len(result), len(trajectory.prev_values)) == (0, steps + 1)
        buffer.add_trajectories([trajectory])
    return witnesses


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *((mode, "dict") for mode in AutoresetMode),
        (AutoresetMode.NEXT_STEP, "array"),
        (AutoresetMode.NEXT_STEP, "tuple"),
    ],
)
def test_rows_spans_and_episodes_are_those_of_the_environments(tmp_path: Path, mode: AutoresetMode, kind: str) -> None:
    with writer_to(tmp_path, seed=1, sample_window_size=0) as buffer:
        witnesses = collected(mode, kind, buffer)
        buffer.flush()
        episodes = [episode for witness in witnesses for episode in witness.episodes]
        seen = {step[0]: step for episode in episodes for step in episode}
        after = {step[0]: episode[at:] for episode in episodes for at, step in enumerate(episode)}
        batch = buffer.sample(len(seen), sampler=EpochSampler())
        codes, then = code_of(batch["curr_obs"]).tolist(), code_of(batch["next_obs"]).tolist()
        assert sorted(codes) == sorted(seen), "every step once, and none that only resets"
        rewards, ends = batch["rewards"].flatten().tolist(), batch["terminations"].flatten().tolist()
        assert list(zip(codes, then, rewards, ends, strict=True)) == [seen[code] for code in codes]
        assert buffer.total_samples == len(seen)
        block = {  # spans end with their block
            code: at // 33 for witness in witnesses for at, code in enumerate(_in_time(witness, mode))
        }
        spans = sample_sequences(buffer, len(seen), 5, pad=True, sampler=EpochSampler())
        sums = sample_n_step(buffer, len(seen), 5, GAMMA, sampler=EpochSampler())
        bootstrap, total = sums["bootstrap"].flatten().tolist(), sums["rewards"].flatten().tolist()
        for row, mask in zip(code_of(spans["curr_obs"]).tolist(), spans["mask"].tolist(), strict=True):
            run = [step[0] for step in after[row[0]][:5] if block[step[0]] == block[row[0]]]
            assert [code for code, good in zip(row, mask, strict=True) if good] == run
        last = code_of(sums["next_obs"]).tolist()
        for row, code in enumerate(code_of(sums["curr_obs"]).tolist()):
            run_of = [step for step in after[code][:5] if block[step[0]] == block[code]]
            assert last[row] == run_of[-1][1]
            assert total[row] == pytest.approx(sum(GAMMA**at * step[2] for at, step in enumerate(run_of)), rel=1e-5)
            assert bootstrap[row] == pytest.approx(0 if run_of[-1][3] else GAMMA ** len(run_of), rel=1e-5)
    assert inspect(tmp_path)["samples"] == len(seen)


def _in_time(witness: Witness, mode: AutoresetMode) -> list[int]:
    """Return a code for each step of the vector environment; -1 for one that only resets."""
    codes: list[int] = []
    for episode in witness.episodes:
        codes += [step[0] for step in episode]
        cut = len(codes) == 33 + 12
        if mode is AutoresetMode.NEXT_STEP and not cut:
            codes.append(-1)
    return codes


def _has_ended(witness: Witness) -> bool:
    return bool(witness.episodes[-1]) and (witness.episodes[-1][-1][3] or len(witness.episodes[-1]) == 9)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_episodes_in_many_blocks_are_converted_as_the_environments_saw_them(
    tmp_path: Path, mode: AutoresetMode
) -> None:
    """Also those whose end and reset are the last two steps of a block."""
    with writer_to(tmp_path / "store") as buffer:
        witnesses = collected(mode, "dict", buffer, blocks=16, steps=5)
    convert_to(tmp_path / "store", tmp_path / "set", "lerobot")
    convert_from(tmp_path / "set", tmp_path / "episodes", "lerobot")
    with TrajectoryReplayBuffer.open(tmp_path / "episodes") as reader:
        codes = [code_of(reader.get(number).curr_obs).flatten().tolist() for number in reader.trajectory_ids.tolist()]
    seen = [[step[0] for step in episode] for witness in witnesses for episode in witness.episodes if episode]
    assert sorted(codes) == sorted(seen)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("seed", range(3))
def test_each_episode_becomes_a_block_as_its_environment_saw_it(tmp_path: Path, mode: AutoresetMode, seed: int) -> None:
    """Taken after any number of steps, also none; resets cut episodes whose steps were taken, and others."""
    choice = np.random.default_rng(seed)
    witnesses = [Witness(number, "dict") for number in range(1, 5)]
    environment = SyncVectorEnv([lambda w=w: w for w in witnesses], autoreset_mode=mode, copy=False)  # type: ignore[misc]
    steps, taken = VectorSteps(environment), []
    steps.reset(environment.reset(seed=seed)[0])
    environment.action_space.seed(seed)
    for number in range(120):
        actions = environment.action_space.sample()
        steps.add(actions, environment.step(actions), versions=np.full(4, number, np.float32))
        if mode is AutoresetMode.DISABLED and steps.ended.any():
            mask = steps.ended
            steps.reset(environment.reset(options={"reset_mask": mask})[0], mask)
        if choice.random() < 0.3:
            taken += steps.take_episodes()
        if choice.random() < 0.1:
            steps.reset(environment.reset(seed=number)[0])
        if choice.random() < 0.1:
            taken += steps.take_episodes()
    ended = taken + steps.take_episodes()
    rest = steps.take_episodes(unfinished=True)
    assert (steps.take_episodes(unfinished=True), len(steps)) == ([], 0)
    assert [bool(episode.dones[-1]) for episode in [*ended, *rest]] == [True] * len(ended) + [False] * len(rest)
    assert len(rest) == sum(bool(witness.episodes[-1]) and not _has_ended(witness) for witness in witnesses)
    found: dict[int, list[Any]] = {number: [] for number in range(1, 5)}
    for episode in [*ended, *rest]:
        codes, then = code_of(episode.curr_obs)[:, 0].tolist(), code_of(episode.next_obs)[:, 0].tolist()
        columns = [getattr(episode, name).flatten().tolist() for name in ("rewards", "terminations")]
        found[codes[0] // 1_000_000].append(list(zip(codes, then, *columns, strict=True)))
        assert episode.dones[:-1].sum() == 0
        assert torch.equal(episode.dones, episode.terminations | episode.truncations)
        assert episode.versions.flatten().diff().eq(1).all()
    assert found == {n: [episode for episode in w.episodes if episode] for n, w in enumerate(witnesses, start=1)}
    with writer_to(tmp_path) as buffer:
        ids = buffer.add_trajectories([*ended, *rest])
        annotate(buffer, ids, {"outcome": [float(len(episode.rewards) > 8) for episode in (*ended, *rest)]})
        long = buffer.query().where("outcome = 1").select("steps", "version_low", "version_high").rows()
        assert {(row["steps"], row["version_high"] - row["version_low"]) for row in long} == {(9, 8)}
        kept = [buffer.get(number) for number in ids]
        assert [one.model_weights_id for one in kept] == [get_model_weights_id(one.versions) for one in kept]
    with pytest.raises(ConfigurationError, match="not both"):
        steps.take()


class WithoutFinal(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    def step(self, actions: Any) -> Any:
        *values, info = self.env.step(actions)
        return (*values, {name: value for name, value in info.items() if "final" not in name})


def test_what_cannot_be_stored_right_is_refused() -> None:
    def make(mode: Any) -> VectorEnv[Any, Any, Any]:
        return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=3)] * 2, autoreset_mode=mode)

    actions = np.zeros(2, np.int64)
    environment = WithoutFinal(make(AutoresetMode.SAME_STEP))
    steps = VectorSteps(environment)
    with pytest.raises(ConfigurationError, match=r"call reset\(observations\)"):
        steps.add(actions, environment.step(actions) if steps.ended.any() else (0,) * 5)
    steps.reset(environment.reset(seed=1)[0])
    for _ in range(2):
        steps.add(actions, environment.step(actions))
    with pytest.raises(InvalidTrajectoryError, match=r'environment 0 ended in mode same_step, and info\["final_obs"\]'):
        steps.add(actions, environment.step(actions))
    assert len(steps) == 2
    disabled = make(AutoresetMode.DISABLED)
    steps = VectorSteps(disabled)
    steps.reset(disabled.reset(seed=1)[0])
    for _ in range(3):
        result = disabled.step(actions)
        steps.add(actions, result)
    with pytest.raises(ConfigurationError, match=r"environments \[0, 1\] ended and were not reset"):
        steps.add(actions, result)
    with pytest.raises(ConfigurationError, match=r"autoreset: next_step, .*disabled"):
        VectorSteps(disabled, autoreset="next_step")
    with pytest.raises(ConfigurationError, match="does not give its mode"):
        VectorSteps(object())
    steps.reset(disabled.reset(seed=1)[0])
    for odd in ({"arm": actions}, (actions, actions), ("go", "stop")):
        with pytest.raises(InvalidTrajectoryError, match=r"actions: .* is not an array of numbers"):
            steps.add(odd, result)
    with pytest.raises(InvalidTrajectoryError, match=r"observations\.goal: .* is not an array of numbers"):
        VectorSteps(disabled).reset({"goal": np.array(["go", "stop"])})
    with pytest.raises(InvalidTrajectoryError, match="no steps were collected"):
        VectorSteps(disabled).take()
