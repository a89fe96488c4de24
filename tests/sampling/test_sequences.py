"""Sequences, n-step transitions, hindsight goals and groups against plain loops over the trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.chance import fits
from tests.stores import writer_to
from trajstore import AgentTrajectory, Retention, Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer import sequences
from trajstore._core.buffer.sampling import Batch
from trajstore._core.buffer.sequences import sample_hindsight, sample_n_step, sample_sequences
from trajstore._core.formats import FORMATS
from trajstore.errors import ConfigurationError, EmptyBufferError, EpochsEndedError, SchemaMismatchError
from trajstore.loader import ReplayLoader
from trajstore.samplers import Drawn, EpochSampler, GroupSampler, Priorities, UseLimit, WeightedSampler

GAMMA = 0.5


class World:
    """Trajectories of random shapes and episodes, and the successors of every step by a plain loop."""

    def __init__(self, shapes: list[tuple[int, int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.buffer = TrajectoryReplayBuffer(seed=seed, sample_window_size=0)
        self.after: dict[int, list[int]] = {}
        self.reward: dict[int, float] = {}
        self.terminal: set[int] = set()
        code = 0
        for steps, batch in shapes:
            codes = code + torch.arange(steps * batch).reshape(steps, batch, 1)
            code += steps * batch
            dones = torch.rand(steps, batch, 1, generator=generator) < 0.3
            terminations = dones & (torch.rand(steps, batch, 1, generator=generator) < 0.5)
            rewards = torch.rand(steps, batch, 1, generator=generator)
            observed = {"code": codes.clone(), "goal": -codes.clone()}
            following = {"code": codes + 100_000, "goal": -codes.clone()}
            self.buffer.add_trajectories(
                [
                    Trajectory(
                        rewards=rewards, dones=dones, terminations=terminations, curr_obs=observed, next_obs=following
                    )
                ]
            )
            for t in range(steps):
                for b in range(batch):
                    run = []
                    for later in range(t, steps):
                        run.append(int(codes[later, b]))
                        if dones[later, b]:
                            break
                    self.after[run[0]] = run
                    self.reward[run[0]] = float(rewards[t, b])
                    if terminations[t, b]:
                        self.terminal.add(run[0])


shapes = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=5)


def around(after: dict[int, list[int]], code: int, burn_in: int, length: int) -> tuple[list[int], list[bool]]:
    """Return the steps of a window and its mask: the first and last one of the episode are repeated."""
    previous = {run[1]: first for first, run in after.items() if len(run) > 1}
    before: list[int] = []
    while len(before) < burn_in and (code if not before else before[0]) in previous:
        before.insert(0, previous[code if not before else before[0]])
    run = after[code][:length]
    absent, beyond = burn_in - len(before), length - len(run)
    steps = before + run
    codes = [steps[0]] * absent + steps + [steps[-1]] * beyond
    return codes, [False] * absent + [True] * len(steps) + [False] * beyond


def check_windows(batch: Batch, after: dict[int, list[int]], burn_in: int, length: int) -> None:
    for codes, mask in zip(batch["curr_obs"]["code"][..., 0].tolist(), batch["mask"].tolist(), strict=True):
        assert (codes, mask) == around(after, codes[burn_in], burn_in, length)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 99), st.integers(1, 4), st.integers(0, 4))
def test_padded_sequences_are_the_steps_around_each_step(
    sizes: list[tuple[int, int]], seed: int, length: int, burn_in: int
) -> None:
    world = World(sizes, seed)
    check_windows(sample_sequences(world.buffer, 32, length, pad=True, burn_in=burn_in), world.after, burn_in, length)


class OfTheUsers(EpochSampler):
    def draw(self, count: int, generator: torch.Generator, first: int | None = None) -> Drawn:  # type: ignore[override]
        return super().draw(count, generator, first)


def test_a_sampler_of_the_users_that_does_not_ask_which_rows_fit_is_named() -> None:
    world = World([(6, 2)], 3)
    assert len(sample_sequences(world.buffer, 4, 3, pad=True, sampler=OfTheUsers())["mask"]) == 4
    with pytest.raises(ConfigurationError, match=r"sampler: OfTheUsers\.draw has no argument fits=.*or .* pad=True"):
        sample_sequences(world.buffer, 4, 3, sampler=OfTheUsers())


def test_a_draw_within_a_draw_follows_what_left_meanwhile() -> None:
    buffer = World([(3, 2)] * 4, 1).buffer
    sampler = EpochSampler()

    def let_one_go_and_draw() -> Drawn:
        buffer.draw(1, sampler=sampler)
        buffer._live.contents.drop(np.array([0]))
        return buffer.draw(40, sampler=sampler)

    assert set(buffer._sampling.together(sampler, lambda _: let_one_go_and_draw()).ids.tolist()) == {1, 2, 3}
    assert sampler.ids.tolist() == [1, 2, 3]


def test_sequences_longer_than_any_episode_are_an_error_that_counts() -> None:
    world = World([(4, 2)], seed=0)
    with pytest.raises(EmptyBufferError, match="of 1000 drawn steps, none has 8 more"):
        sample_sequences(world.buffer, 8, 9)
    with pytest.raises(SchemaMismatchError, match="ended"):
        sample_sequences(world.buffer, 8, 2, ends=["ended"])


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 99), st.integers(1, 4))
def test_n_step_transitions_are_those_of_a_loop(sizes: list[tuple[int, int]], seed: int, n: int) -> None:
    world = World(sizes, seed)
    batch = sample_n_step(world.buffer, 32, n, GAMMA)
    assert (batch["rewards"] + batch["bootstrap"]).shape == batch["rewards"].shape, "a target has the rewards' shape"
    for row in range(len(batch["steps"])):
        run = world.after[int(batch["curr_obs"]["code"][row])][:n]
        assert batch["rewards"][row].item() == pytest.approx(
            sum(GAMMA**at * world.reward[code] for at, code in enumerate(run)), rel=1e-5
        )
        assert batch["steps"][row] == len(run)
        assert batch["next_obs"]["code"][row] == run[-1] + 100_000
        assert batch["bootstrap"][row].item() == (0 if run[-1] in world.terminal else GAMMA ** len(run))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.uint8, torch.float64])
def test_n_step_rewards_of_any_real_dtype(dtype: torch.dtype) -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    ends = torch.zeros(3, 1, 1, dtype=torch.bool)
    buffer.add_trajectories([Trajectory(rewards=torch.ones(3, 1, 1).to(dtype), dones=ends, terminations=ends)])
    batch = sample_n_step(buffer, 20, 2, 0.5)
    assert batch["rewards"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert set(batch["rewards"].flatten().tolist()) == {1.0, 1.5}


def test_n_steps_without_a_next_observation_are_named(caplog: pytest.LogCaptureFixture) -> None:
    sequences._warn_of_no_next.cache_clear()
    buffer = TrajectoryReplayBuffer(seed=0)
    ends = torch.zeros(3, 1, 1, dtype=torch.bool)
    buffer.add_trajectories([Trajectory(rewards=torch.ones(3, 1, 1), dones=ends, terminations=ends)])
    sample_n_step(buffer, 2, 2, 0.5, columns=["dones"])
    assert "next_obs" not in caplog.text
    for _ in range(2):
        sample_n_step(buffer, 2, 2, 0.5)
    assert caplog.text.count("have no next_obs") == 1


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_hindsight_goals_are_achieved_later_in_the_same_episode(strategy: str) -> None:
    world = World([(9, 2), (5, 1)], seed=1)
    seen: dict[int, list[int]] = {}
    relabelled = 0
    for _ in range(100):
        batch = sample_hindsight(
            world.buffer,
            20,
            goal="curr_obs.goal",
            achieved="next_obs.code",
            reward=lambda achieved, goal: (achieved == goal).float(),
            share=0.5,
            strategy=strategy,  # type: ignore[arg-type]
        )
        codes, goals = batch["curr_obs"]["code"][:, 0].tolist(), batch["curr_obs"]["goal"][:, 0].tolist()
        relabelled += int(batch["relabelled"].sum())
        assert torch.equal(batch["curr_obs"]["goal"], batch["next_obs"]["goal"])
        for row, (code, goal) in enumerate(zip(codes, goals, strict=True)):
            if not batch["relabelled"][row]:
                assert goal == -code
                assert batch["rewards"][row].item() == pytest.approx(world.reward[code])
                continue
            run = world.after[code]
            assert goal - 100_000 in (run if strategy == "future" else run[-1:])
            assert batch["rewards"][row].item() == float(goal - 100_000 == code)
            seen.setdefault(code, []).append(run.index(goal - 100_000))
    assert fits([relabelled, 2000 - relabelled], [1, 1])
    longest = max(seen, key=lambda code: len(world.after[code]))
    if strategy == "future":
        size = len(world.after[longest])
        assert fits(np.bincount(seen[longest], minlength=size).tolist(), [1] * size)


def test_hindsight_names_what_does_not_fit() -> None:
    world = World([(4, 1)], seed=0)
    options = {"goal": "curr_obs.goal", "achieved": "next_obs.code", "reward": lambda achieved, goal: goal[:, 0]}
    with pytest.raises(ConfigurationError, match=r"reward returned \[4\], must be \[4, 1\]"):
        sample_hindsight(world.buffer, 8, share=1.0, **options)  # type: ignore[arg-type]
    with pytest.raises(SchemaMismatchError, match=r"column curr_obs\.target: absent"):
        sample_hindsight(world.buffer, 8, **{**options, "goal": "curr_obs.target"})  # type: ignore[arg-type]


def test_groups_are_whole_and_uniform_over_tasks() -> None:
    buffer = TrajectoryReplayBuffer(seed=0, sample_window_size=0)
    tasks = ["a", "b", "a", "", "c", "b", "a"]
    ids = buffer.add_trajectories(
        [
            AgentTrajectory(input_ids=torch.tensor([at]), task_id=task, policy_version=at)
            for at, task in enumerate(tasks)
        ]
    )
    sampler = GroupSampler(least=2)
    drawn = [tuple(rollout.task_id for rollout in buffer.sample_trajectories(1, sampler=sampler)) for _ in range(400)]  # type: ignore[union-attr]
    assert fits([drawn.count(("a", "a", "a")), drawn.count(("b", "b"))], [1, 1])
    buffer.evict([ids[1]])
    with pytest.raises(EmptyBufferError, match="none of 3 tasks has 4 rollouts"):
        buffer.sample_trajectories(1, sampler=GroupSampler(least=4))
    assert sampler.draw(5, torch.Generator()).ids.tolist() != []


def test_sequences_by_priority_are_one_draw_with_one_set_of_weights() -> None:
    world = World([(9, 2), (3, 1), (12, 3)], seed=4)
    sampler = WeightedSampler(priorities=Priorities(alpha=1, beta=1, eps=0))
    everything = np.array([(number, at) for number, size in enumerate((18, 3, 36)) for at in range(size)])
    chances = 1.0 + np.arange(len(everything)) % 7
    sampler.follow(world.buffer)
    world.buffer.update_priorities(sampler, Drawn(everything[:, 0], everything[:, 1]), chances)
    known = dict(zip(map(tuple, everything.tolist()), chances.tolist(), strict=True))
    counts: dict[int, int] = {}
    for _ in range(40):
        batch = sample_sequences(world.buffer, 100, 3, sampler=sampler)
        drawn = [known[row] for row in zip(batch.drawn.ids.tolist(), batch.drawn.samples.tolist(), strict=True)]
        assert batch.drawn.weights is not None
        assert batch.drawn.probabilities is None
        assert batch.drawn.weights.tolist() == pytest.approx([min(drawn) / chance for chance in drawn], rel=1e-6)
        for code in batch["curr_obs"]["code"][:, 0, 0].tolist():
            counts[code] = counts.get(code, 0) + 1
    possible = [code for code, run in world.after.items() if len(run) >= 3]
    assert fits([counts.get(code, 0) for code in possible], [chances[code] for code in possible])
    assert set(counts) <= set(possible)


def test_every_start_of_a_whole_sequence_comes_once_an_epoch_and_rejected_ones_are_not_used() -> None:
    world = World([(9, 2), (3, 1), (12, 3)], seed=4)
    sampler, starts = EpochSampler(epochs=1), []
    possible = sorted(code for code, run in world.after.items() if len(run) >= 3)
    while len(starts) < len(possible):
        starts += sample_sequences(world.buffer, 4, 3, sampler=sampler)["curr_obs"]["code"][:, 0, 0].tolist()
    assert sorted(starts) == possible
    with pytest.raises(EpochsEndedError):
        sample_sequences(world.buffer, 4, 3, sampler=sampler)
    short = World([(2, 1), (2, 1), (40, 1)], seed=1)
    limited = WeightedSampler([UseLimit(max_uses=1)])
    sample_sequences(short.buffer, 4, 3, sampler=limited)
    assert limited.figures()["used_up_trajectories"] == 1


def test_steps_beyond_an_end_do_not_count_even_where_they_are_no_numbers_and_padding_repeats_the_last_step() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    dones = torch.tensor([False, True, False, False]).reshape(4, 1, 1)
    rewards = torch.tensor([1.0, 2.0, float("nan"), float("nan")]).reshape(4, 1, 1)
    buffer.add_trajectories([Trajectory(rewards=rewards, dones=dones, terminations=dones)])
    sums = sample_n_step(buffer, 4, 3, GAMMA, sampler=EpochSampler())
    of = dict(zip(sums.drawn.samples.tolist(), sums["rewards"].reshape(-1).tolist(), strict=True))
    assert (of[0], of[1]) == (2.0, 2.0)
    padded = sample_sequences(buffer, 4, 3, pad=True, sampler=EpochSampler())
    of_start = dict(zip(padded.drawn.samples.tolist(), padded["rewards"].reshape(4, 3).tolist(), strict=True))
    assert (of_start[0], of_start[1]) == ([1.0, 2.0, 2.0], [2.0, 2.0, 2.0])


def test_sequences_are_read_as_they_were_drawn_though_retention_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer_to(tmp_path, seed=0, retention=Retention(max_trajectories=2)) as buffer:

        def add(value: float) -> None:
            rewards = torch.full((6, 1, 1), value)
            buffer.add_trajectories([Trajectory(rewards=rewards, dones=torch.zeros(6, 1, 1, dtype=torch.bool))] * 2)
            buffer.flush()

        def removed_first(*given: Any) -> Any:
            drawn, complete = together(*given)
            add(2.0)
            assert not np.isin(drawn.ids, buffer.trajectory_ids).any()
            return drawn, complete

        together = buffer._sampling.together
        monkeypatch.setattr(buffer._sampling, "together", removed_first)
        for first, draw in (
            (1.0, lambda: sample_sequences(buffer, 16, 3)["rewards"]),
            (1.75, lambda: sample_n_step(buffer, 16, 3, GAMMA, terminations="dones")["rewards"]),
        ):
            add(1.0)
            assert draw().max() == first


def test_dots_in_keys_need_no_backslash_while_one_column_fits() -> None:
    """As in LeRobot's keys."""
    buffer, zeros = TrajectoryReplayBuffer(seed=0), torch.zeros(4, 2, 1)
    states = torch.arange(8.0).reshape(4, 2, 1)
    observed = {"observation.state": states, "a.b": zeros, "a": {"b": zeros}, "observation.goal": zeros}
    buffer.add_trajectories([Trajectory(rewards=zeros, dones=zeros.bool(), curr_obs=observed, next_obs=observed)])
    batch = buffer.sample(8, columns=["curr_obs.observation.state"], sampler=EpochSampler())
    assert batch["curr_obs"]["observation.state"].flatten().tolist() == batch.drawn.samples.tolist()
    with pytest.raises(SchemaMismatchError, match=r"curr_obs\.a\.b\.c; there are"):
        buffer.sample(1, columns=["curr_obs.a.b.c"])
    assert torch.equal(buffer.sample(1, columns=["curr_obs.a.b"])["curr_obs"]["a"]["b"], zeros[0, :1])
    both = Trajectory(rewards=zeros, curr_obs={"a.b": {"c": zeros}, "a": {"b.c": zeros}})
    other = TrajectoryReplayBuffer(seed=0)
    other.add_trajectories([both])
    with pytest.raises(SchemaMismatchError, match=r"curr_obs\.a\.b\.c may be any of curr_obs\.a\\\.b\.c"):
        other.sample(1, columns=["curr_obs.a.b.c"])
    names = {"goal": "curr_obs.observation.goal", "achieved": "next_obs.observation.state"}
    relabelled = sample_hindsight(buffer, 8, share=1, reward=lambda achieved, goal: goal, **names)  # type: ignore[arg-type]
    assert relabelled["relabelled"].all()
    assert torch.equal(relabelled["rewards"], relabelled["next_obs"]["observation.goal"])


@pytest.mark.parametrize("kind", ["memory", *FORMATS, "rlinf"])
def test_spans_end_with_a_rollout_epoch_unless_its_observations_go_on(tmp_path: Path, kind: str) -> None:
    """Epochs of T / E = 4 steps; some environments go on, some were reset, and no step is done."""
    generator = torch.Generator().manual_seed(3)
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    if kind in FORMATS:
        buffer = writer_to(tmp_path, trajectory_format=kind, seed=1, sample_window_size=0)
    after: dict[int, list[int]] = {}
    ended = 0
    for at, epochs in enumerate((3, 1, 2, 2)):
        steps, batch = 4 * epochs, 3
        code = 1000 * at + torch.arange(steps * batch).reshape(steps, batch, 1)
        state = torch.rand(steps + 1, batch, 2, generator=generator)
        following = state[1:].clone()
        cut = torch.rand(steps, batch, generator=generator) < 0.5
        cut[[step for step in range(steps) if (step + 1) % 4]] = False
        following[cut] += 1  # equal in the first number, and else not, as an image may differ in one pixel
        following[..., 0] = state[1:, :, 0]
        observed = {"code": code, "states": state[:-1], "deep": {"same": torch.zeros(steps, batch, 1)}}
        later = {"states": following, "deep": {"same": torch.zeros(steps, batch, 1)}}
        dones = torch.zeros(steps + epochs, batch, 1, dtype=torch.bool)
        buffer.add_trajectories(
            [Trajectory(rewards=code.float(), dones=dones, terminations=dones, curr_obs=observed, next_obs=later)]
        )
        for start in range(steps):
            for b in range(batch):
                run = []
                for step in range(start, steps):
                    run.append(int(code[step, b]))
                    if cut[step, b]:
                        break
                after[run[0]] = run
                ended += cut[start, b].item() and start + 1 < steps
    assert 3 < ended < 12, "some go on, and some do not"
    if kind == "rlinf":
        buffer.save_checkpoint(str(tmp_path), layout="rlinf")
        buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
        buffer.load_checkpoint(str(tmp_path))
    padded = sample_sequences(buffer, len(after), 6, pad=True, burn_in=3, sampler=EpochSampler())
    sums = sample_n_step(buffer, len(after), 6, 1.0, sampler=EpochSampler())
    check_windows(padded, after, 3, 6)
    for code, total, steps in zip(
        sums["curr_obs"]["code"].flatten().tolist(),
        sums["rewards"].flatten().tolist(),
        sums["steps"].tolist(),
        strict=True,
    ):
        assert (total, steps) == (sum(after[code][:6]), len(after[code][:6]))
    final = sample_hindsight(
        buffer,
        len(after),
        goal="curr_obs.code",
        achieved="curr_obs.code",
        reward=lambda achieved, goal: achieved.float(),
        share=1,
        strategy="final",
        sampler=EpochSampler(),
    )
    for code, goal in zip(
        final["rewards"].flatten().tolist(), final["curr_obs"]["code"].flatten().tolist(), strict=True
    ):
        assert goal == after[int(code)][-1]
    none = sample_sequences(buffer, 400, 6, ends=())["curr_obs"]["code"][..., 0]
    assert all(codes == after[codes[0]][:6] for codes in none.tolist())
    buffer.close()


def test_the_name_of_a_dict_means_all_columns_in_it() -> None:
    buffer, zeros = TrajectoryReplayBuffer(seed=0), torch.zeros(4, 2, 1)
    observed = {"states": zeros, "hand": {"joints": zeros, "force": zeros}, "task": "pick"}
    buffer.add_trajectories([Trajectory(rewards=zeros, dones=zeros.bool(), curr_obs=observed, next_obs=observed)])
    batch = buffer.sample(4, columns=["rewards", "curr_obs.hand"])
    assert (set(batch), set(batch["curr_obs"])) == ({"rewards", "curr_obs"}, {"hand"})
    assert set(batch["curr_obs"]["hand"]) == {"joints", "force"}
    steps = sample_n_step(buffer, 4, 2, 0.9, columns=["next_obs"], terminations="dones")
    assert set(steps["next_obs"]) == {"states", "hand"}
    with ReplayLoader(buffer, batch_size=4, columns=["curr_obs"]) as loader:
        assert set(next(loader)) == {"curr_obs"}
    with pytest.raises(SchemaMismatchError, match=r"no trajectory has curr_obs\.task; .* come with get\(\) alone"):
        buffer.sample(4, columns=["curr_obs.task"])


def test_episode_ends_that_were_not_recorded_are_named_by_their_argument() -> None:
    buffer, zeros = TrajectoryReplayBuffer(seed=0), torch.zeros(4, 2, 1)
    buffer.add_trajectories([Trajectory(rewards=zeros, next_obs={"states": zeros})])
    with pytest.raises(SchemaMismatchError, match=r"^ends .*ends=\(\) if .*: no trajectory has dones"):
        sample_sequences(buffer, 2, 2)
    with pytest.raises(SchemaMismatchError, match=r"^terminations .*terminations='dones' if .* has terminations"):
        sample_n_step(buffer, 2, 2, 0.9, ends=())
