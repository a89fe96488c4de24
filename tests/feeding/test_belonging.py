"""Identity of states: those of other stores, ids, batches or samplers are refused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.feeding.test_loader import block, fill, reader, rewards
from tests.sampling.makers import SAMPLERS
from tests.stores import in_memory, writer_to
from tests.support.waiting import wait_until
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError
from trajstore.loader import ReplayBufferDataset, ReplayLoader, TokenLoader
from trajstore.operations.copying import copy_store
from trajstore.samplers import EpochSampler, GroupSampler, Priorities, Recency, Sampler, UseLimit, WeightedSampler

OF_LOADERS: dict[str, Callable[[], Sampler | None]] = {
    "uniform": lambda: None,
    "epochs": EpochSampler,
    "weighted": lambda: WeightedSampler([UseLimit(cooldown=1)], Priorities()),
}


def interrupted(buffer: TrajectoryReplayBuffer, sampler: Sampler | None) -> tuple[dict[str, Any], list[list[float]]]:
    """Return a loader's state after its first batch, and the five following batches."""
    with ReplayLoader(buffer, 8, sampler=sampler) as loader:
        next(loader)
        return loader.state_dict(), [rewards(next(loader)) for _ in range(5)]


def going_on(buffer: TrajectoryReplayBuffer, state: dict[str, Any], sampler: Sampler | None) -> list[list[float]]:
    """Return five batches of a loader that loads a state."""
    with ReplayLoader(buffer, 8, sampler=sampler) as loader:
        loader.load_state_dict(state)
        return [rewards(next(loader)) for _ in range(5)]


def state_after(buffer: TrajectoryReplayBuffer, batches: int = 3, size: int = 8, **options: Any) -> dict[str, Any]:
    with ReplayLoader(buffer, size, prefetch=2, **options) as loader:
        for _ in range(batches):
            next(loader)
        return loader.state_dict()


@pytest.mark.parametrize("name", list(OF_LOADERS))
def test_the_state_of_another_store_is_refused_and_a_copy_accepted(tmp_path: Path, name: str) -> None:
    for place in ("here", "there"):
        fill(tmp_path / place, range(10)).close()
    state, expected = interrupted(reader(tmp_path / "here"), OF_LOADERS[name]())
    other = ReplayLoader(reader(tmp_path / "there"), 8, sampler=OF_LOADERS[name]())
    with pytest.raises(ConfigurationError, match=r"replay buffer.*10 of 10 ids .*id 0"):
        other.load_state_dict(state)
    copy_store(tmp_path / "here", tmp_path / "copy")
    reader(tmp_path / "here").save_checkpoint(tmp_path / "checkpoint")
    for place in ("copy", "checkpoint"):
        assert going_on(reader(tmp_path / place), state, OF_LOADERS[name]()) == expected


@pytest.mark.parametrize("name", list(OF_LOADERS))
def test_a_run_goes_on_with_its_ids_and_others_under_them_are_told(tmp_path: Path, name: str) -> None:
    """Ids of a run stay when a rank grows; exchanged ranks assign them to other trajectories."""
    for rank in range(2):
        fill(tmp_path / f"rank_{rank}", range(10 * rank, 10 * rank + 5)).close()
    state = state_after(reader(tmp_path), sampler=OF_LOADERS[name]())
    with fill(tmp_path / "rank_0", range(0)) as grown:
        grown.add_trajectories([block(50)])
    with ReplayLoader(reader(tmp_path), 8, sampler=OF_LOADERS[name]()) as fine:
        fine.load_state_dict(state)
        next(fine)
    (tmp_path / "rank_0").rename(tmp_path / "old")
    (tmp_path / "rank_1").rename(tmp_path / "rank_0")
    (tmp_path / "old").rename(tmp_path / "rank_1")
    with pytest.raises(ConfigurationError, match=r"10 of 10 ids are others here \(id 0/0: "):
        ReplayLoader(reader(tmp_path), 8, sampler=OF_LOADERS[name]()).load_state_dict(state)


def test_a_store_of_whose_ids_none_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same store continues with a warning, as after a long pause; another one is refused."""
    with fill(tmp_path / "here", range(10)) as buffer:
        state = state_after(buffer)
        buffer.add_trajectories([block(key) for key in range(20, 24)])
        buffer.evict(list(range(10)))
        with ReplayLoader(buffer, 8) as loader:
            loader.load_state_dict(state)
            assert {int(value) // 1000 for value in rewards(next(loader))} <= set(range(20, 24))
    assert "10 of the 10 that it names are gone" in caplog.text
    with fill(tmp_path / "there", range(10)) as buffer:
        buffer.add_trajectories([block(key) for key in range(4)])
        buffer.evict(list(range(10)))
        with pytest.raises(ConfigurationError, match=r"none of the 10 .*saved for store"):
            ReplayLoader(buffer, 8).load_state_dict(state)


def test_a_store_that_has_grown_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fill(tmp_path, range(10)) as buffer:
        state = state_after(buffer)
        with ReplayLoader(buffer, 8) as loader:
            loader.load_state_dict(state)
            buffer.add_trajectories([block(10)])  # not a difference: added after the state was loaded
            next(loader)
        assert caplog.text == ""
        with ReplayLoader(buffer, 8) as loader:
            loader.load_state_dict(state)
            next(loader)
    assert "shows 11 trajectories, 10 when it was taken" in caplog.text


def test_what_is_in_memory_only_has_no_names(caplog: pytest.LogCaptureFixture) -> None:
    """Adding the same trajectories again in each process, like demonstrations, is accepted."""

    buffer, same = (TrajectoryReplayBuffer(seed=1, sample_window_size=0) for _ in range(2))
    for each_buffer in (buffer, same):
        each_buffer.add_trajectories([block(key) for key in range(10)])
    state, expected = interrupted(buffer, EpochSampler())
    assert going_on(same, state, EpochSampler()) == expected
    assert caplog.text == ""


def test_another_batch_size_is_refused_unless_it_is_wanted(tmp_path: Path) -> None:
    fill(tmp_path, range(10)).close()
    state = state_after(reader(tmp_path), sampler=EpochSampler())
    with ReplayLoader(reader(tmp_path), 4, sampler=EpochSampler()) as loader:
        with pytest.raises(ConfigurationError, match=r"batch_size 8 \(here 4\).*changed=True"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, changed=True)
        sizes = [len(rewards(next(loader))) for _ in range(6)]
        under_way = len(state["under_way"])
        assert sizes == [8] * under_way + [4] * (6 - under_way)
        ReplayLoader(reader(tmp_path), 4, sampler=EpochSampler()).load_state_dict(loader.state_dict())
    plain = state_after(reader(tmp_path))
    with pytest.raises(ConfigurationError, match=r"sample_window_size \[0\] \(here \[4\]\)"):
        ReplayLoader(TrajectoryReplayBuffer.open(tmp_path, sample_window_size=4), 8).load_state_dict(plain)
    for changed in (False, True):  # no remedy that would be refused in turn
        with pytest.raises(ConfigurationError, match=r"where= or ids= given: \[False\], here \[True\]"):
            ReplayLoader(reader(tmp_path), 8, ids=[1, 2]).load_state_dict(plain, changed=changed)


def test_token_batches(tmp_path: Path) -> None:
    def store(name: str) -> TrajectoryReplayBuffer:
        buffer = TrajectoryReplayBuffer(seed=1, auto_save=True, auto_save_path=tmp_path / name, sample_window_size=0)
        buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(3 + key)) for key in range(8)])
        buffer.flush()
        return buffer

    with store("here") as here, store("there") as other:
        with TokenLoader(here, 20) as loader:
            next(loader)
            state = loader.state_dict()
        with pytest.raises(ConfigurationError, match=r"waits for a pack belongs to other trajectories"):
            TokenLoader(other, 20).load_state_dict(state)
        with TokenLoader(here, 16) as loader:
            with pytest.raises(ConfigurationError, match=r"tokens 20 \(here 16\)"):
                loader.load_state_dict(state)
            loader.load_state_dict(state, changed=True)
            for _ in range(12):
                next(loader)


def test_a_loader_whose_state_was_refused_gives_no_batches_without_it(tmp_path: Path) -> None:
    """Errors that only the sampler can detect are raised by every ``next``."""
    fill(tmp_path, range(10)).close()
    state = state_after(reader(tmp_path), sampler=WeightedSampler([Recency(3.0)]))
    with ReplayLoader(reader(tmp_path), 8, sampler=EpochSampler()) as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="was saved by a sampler 'weighted', this one is 'epochs'"):
                next(loader)


@pytest.mark.parametrize(
    ("then", "here", "message"),
    [
        (lambda: WeightedSampler(priorities=Priorities()), EpochSampler, "'weighted', this one is 'epochs'"),
        (lambda: EpochSampler(unit="trajectory"), EpochSampler, r"unit 'trajectory' \(here 'sample'\)"),
        (
            lambda: WeightedSampler(priorities=Priorities(alpha=0.5)),
            lambda: WeightedSampler(priorities=Priorities(alpha=0.6)),
            r"priorities.alpha 0.5 \(here 0.6\)",
        ),
        (
            lambda: WeightedSampler([Recency(2, by="versions")]),
            lambda: WeightedSampler([Recency(2)]),
            r"recency.by 'versions' \(here 'trajectories'\)",
        ),
    ],
)
def test_samplers_of_another_kind(then: Callable[[], Sampler], here: Callable[[], Sampler], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        here().load_state_dict(then().state_dict())


@pytest.mark.parametrize("name", ["epochs", "uses"])
def test_a_samplers_state_of_another_store(tmp_path: Path, name: str) -> None:
    make = SAMPLERS[name]
    fill(tmp_path / "here", range(6)).close()
    fill(tmp_path / "there", range(6)).close()
    here, there = reader(tmp_path / "here"), reader(tmp_path / "there")
    sampler = make()
    if sampler.unit == "sample":
        here.sample(8, sampler=sampler)
    else:
        here.sample_trajectories(3, sampler=sampler)
    state = sampler.state_dict()
    again, other = make(), make()
    again.follow(here)
    again.load_state_dict(state)
    other.follow(there)
    before = other.state_dict()
    with pytest.raises(ConfigurationError, match="belongs to other trajectories"):
        other.load_state_dict(state)
    assert str(other.state_dict()) == str(before)


def test_arguments_that_a_run_may_change_are_told(caplog: pytest.LogCaptureFixture) -> None:
    EpochSampler(epochs=5).load_state_dict(EpochSampler(epochs=2).state_dict())
    assert "epochs 2 (here 5)" in caplog.text


@pytest.mark.parametrize("state", [None, 3, "x", [], {}, {"source": {}}, {"uses": {}}])
def test_what_is_no_state(tmp_path: Path, state: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    buffer = TrajectoryReplayBuffer(seed=1)
    takers: list[Any] = [
        buffer,
        ReplayLoader(buffer, 4),
        TokenLoader(buffer, 4),
        ReplayBufferDataset(buffer, None, 4, 1, 1),
        EpochSampler(),
        GroupSampler(),
        WeightedSampler(),
    ]
    for taker in takers:
        before = str(taker.state_dict())
        with pytest.raises(ConfigurationError, match=r"^state: "):
            taker.load_state_dict(state)
        assert str(taker.state_dict()) == before


def test_a_sampler_that_follows_no_buffer_says_that_it_takes_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fill(tmp_path / "store", range(3)) as buffer:
        sampler = WeightedSampler([], Priorities())
        buffer.update_priorities(sampler, buffer.draw(4, sampler=sampler), torch.ones(4))
        WeightedSampler([], Priorities()).load_state_dict(sampler.state_dict())
    assert "call sampler.follow(buffer) first" in caplog.text


@pytest.mark.parametrize("stored", [True, False])
def test_a_sampler_of_another_buffer_is_refused(tmp_path: Path, stored: bool) -> None:
    """Priorities are by id, and another buffer's ids are of other trajectories."""

    def make(name: str) -> TrajectoryReplayBuffer:
        if stored:
            return fill(tmp_path / name, range(4))
        return in_memory([block(key) for key in range(4)])

    sampler = WeightedSampler([], Priorities())
    with make("a") as first, make("b") as other:
        first.sample(4, sampler=sampler)
        with pytest.raises(ConfigurationError, match="follows another buffer"):
            other.sample(4, sampler=sampler)
        if stored:
            with reader(tmp_path / "a") as same:
                same.sample(4, sampler=sampler)
    with make("c") as next_one:
        next_one.sample(4, sampler=sampler)  # the first was closed


def test_rows_that_were_drawn_before_another_load_are_drawn_anew(tmp_path: Path) -> None:
    """Rows are never read from other trajectories that now have their ids; earlier batches stay unchanged."""
    fill(tmp_path / "there", range(100, 110)).close()
    fill(tmp_path / "here", range(10)).close()
    buffer = reader(tmp_path / "here")
    ahead = ReplayLoader(buffer, 8, prefetch=6)
    next(ahead)
    wait_until(lambda: ahead.figures()["batches_ready"] == 6)
    with ReplayLoader(buffer, 8, prefetch=1) as loader:
        loader.load_state_dict(ahead.state_dict())
        ahead.close()
        next(loader)
        wait_until(lambda: loader.figures()["batches_ready"] == 1)
        under_way = loader.state_dict()["under_way"]
        buffer.load_checkpoint(tmp_path / "there")
        given = [next(loader) for _ in range(len(under_way))]
        assert loader.figures()["batches_redrawn"] == len(under_way) == 5
    for batch, (then,) in zip(given, under_way, strict=True):
        assert min(rewards(batch)) >= 100_000
        assert batch.drawn.ids.tolist() != then["ids"].tolist()


def test_rollouts_that_wait_for_a_pack_go_when_another_store_is_loaded(tmp_path: Path) -> None:
    """Otherwise, trajectories with the same ids would fill packs that were sized for the originals."""
    buffer = TrajectoryReplayBuffer(seed=1)
    with writer_to(tmp_path / "there") as writer:
        for each_buffer, length in ((buffer, 4), (writer, 40)):
            each_buffer.add_trajectories([AgentTrajectory(input_ids=torch.full((length,), length)) for _ in range(20)])
    with TokenLoader(buffer, 80, prefetch=1) as loader:
        next(loader)
        wait_until(lambda: loader.figures()["batches_ready"] == 1)
        buffer.load_checkpoint(tmp_path / "there")
        next(loader)
        for [pack] in itertools.islice(loader, 5):
            assert set(pack["input_ids"].tolist()) == {40}
            assert len(pack["input_ids"]) <= 80


# -- stores of ranks: shared, or one per rank --------------------------------------------------------


def test_ranks_with_a_store_each_draw_their_part_of_the_batch_from_it(tmp_path: Path) -> None:
    sizes = []
    for rank in range(3):
        fill(tmp_path / f"rank_{rank}", range(10 * rank, 10 * rank + 5)).close()
        options: dict[str, Any] = {"rank": (rank, 3), "stores": "per_rank"}
        sampler = WeightedSampler(priorities=Priorities())  # ranks draw independently
        with ReplayLoader(reader(tmp_path / f"rank_{rank}"), 10, sampler=sampler, **options) as loader:
            values = rewards(next(loader))
            state = loader.state_dict()
            expected = rewards(next(loader))
        assert {int(value) // 10_000 for value in values} == {rank}
        sizes.append(len(values))
        sampler = WeightedSampler(priorities=Priorities())
        with ReplayLoader(reader(tmp_path / f"rank_{rank}"), 10, sampler=sampler, **options) as again:
            again.load_state_dict(state)
            assert rewards(next(again)) == expected
    assert sizes == [3, 3, 4]


def test_a_state_of_other_stores_or_of_another_rank_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, range(5)).close()

    def loader(rank: tuple[int, int], stores: Any) -> ReplayLoader:
        return ReplayLoader(reader(tmp_path), 10, rank=rank, stores=stores)

    shared, own = loader((0, 2), "shared").state_dict(), loader((0, 2), "per_rank").state_dict()
    loader((2, 3), "shared").load_state_dict(shared)
    for rank, stores, state in (((0, 2), "per_rank", shared), ((0, 2), "shared", own), ((1, 2), "per_rank", own)):
        with pytest.raises(ConfigurationError, match="the state is of a loader with"):
            loader(rank, stores).load_state_dict(state)


def test_a_share_is_not_drawn_from_as_if_it_were_the_whole_store(tmp_path: Path) -> None:
    fill(tmp_path, range(6)).close()
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.load_checkpoint(tmp_path, is_distributed=True, local_rank=1, world_size=2)
    with pytest.raises(ConfigurationError, match=r"shows the share \(1, 2\) only"):
        ReplayLoader(buffer, 8, rank=(1, 2))
    with ReplayLoader(buffer, 8, rank=(1, 2), stores="per_rank") as loader:
        assert len(rewards(next(loader))) == 4
    with pytest.raises(ConfigurationError, match="stores: 'mine', must be one of 'shared', 'per_rank'"):
        ReplayLoader(buffer, 8, stores="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["transitions", "tokens"])
def test_a_state_with_other_keys_or_counts_is_refused(kind: str) -> None:
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(5)) if kind == "tokens" else block(0)])
    loader: Any = TokenLoader(buffer, 20) if kind == "tokens" else ReplayLoader(buffer, 2)
    state = loader.state_dict()
    for name in ("handed_out", "batches", "redrawn"):
        with pytest.raises(ConfigurationError, match=f"state: {name}: -1, must be"):
            loader.load_state_dict(state | {name: -1})
    for wrong in (state | {"note": 1}, state | {"source": state["source"] | {"note": 1}}):
        with pytest.raises(ConfigurationError, match="state: unknown keys 'note'"):
            loader.load_state_dict(wrong)
    loader.load_state_dict(state | {"limiter": None})  # as all loaders without a rate limiter once recorded
    with pytest.raises(ConfigurationError, match="state: unknown keys 'limiter'"):
        loader.load_state_dict(state | {"limiter": {"added": 1, "drawn": 0, "balance": 0.0}})
    loader.load_state_dict(state)
