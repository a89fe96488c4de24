"""The loader: batches independent of prefetching; errors, waiting, ends; state; workers."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.stores import in_memory, refused
from tests.support.waiting import wait_until
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore._core.feeding import prefetch
from trajstore.errors import (
    ConfigurationError,
    EmptyBufferError,
    SchemaMismatchError,
    StoreClosedError,
    TrajectoryUnavailableError,
)
from trajstore.loader import (
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    ReplayLoader,
    Share,
    TokenLoader,
    replay_buffer_collate_fn,
)
from trajstore.samplers import EpochSampler, Priorities, Sampler, UseLimit, WeightedSampler

Store = Callable[..., TrajectoryReplayBuffer]


def block(key: int, width: int = 1) -> Trajectory:
    rewards = 1000.0 * key + torch.arange(8, dtype=torch.float64).reshape(4, 2, 1).expand(4, 2, width)
    return Trajectory(rewards=rewards.contiguous(), curr_obs={"s": rewards.float().contiguous()})


def fill(path: Path, keys: range, **more: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=1, auto_save=True, auto_save_path=path, sample_window_size=0, **more)
    if not len(buffer):
        buffer.add_trajectories([block(key) for key in keys])
        buffer.flush()
    return buffer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened: list[TrajectoryReplayBuffer] = []

    def make(name: str = "replay", keys: range = range(10)) -> TrajectoryReplayBuffer:
        opened.append(fill(tmp_path / name, keys))
        return opened[-1]

    yield make
    for buffer in opened:
        buffer.close()


def reader(path: Path, pin: str | None = None) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    buffer.load_checkpoint(path, pin=pin)
    return buffer


def rewards(batch: dict[str, Any]) -> list[float]:
    assert torch.equal(batch["curr_obs"]["s"].double(), batch["rewards"])
    values: list[float] = batch["rewards"].reshape(-1).tolist()
    return values


def test_batches_in_memory_that_is_used_again_stay_whole_until_the_next_is_asked_for(store: Store) -> None:
    with ReplayLoader(store(), 16, prefetch=3, reuse=True) as loader:
        seen = set()
        for batch in itertools.islice(loader, 40):
            seen.add(batch["rewards"].data_ptr())
            before = rewards(batch)
            loader._running._changed.acquire()  # type: ignore[union-attr]  # a moment for the thread to go on
            loader._running._changed.release()  # type: ignore[union-attr]
            assert rewards(batch) == before
        assert len(seen) <= 5


def test_where_demonstrations_are_few_the_replay_buffer_fills_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    replay, demos = TrajectoryReplayBuffer(seed=0), TrajectoryReplayBuffer(seed=0)
    replay.add_trajectories([block(key) for key in range(4)])
    demos.add_trajectories([block(100)])
    with ReplayLoader({"online": Share(replay), "demos": Share(demos)}, 24) as loader:
        for batch in itertools.islice(loader, 3):
            assert [value >= 100_000 for value in rewards(batch)] == [False] * 16 + [True] * 8
    assert ["demos provided 8 of the 12" in record.message for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("by_demos", [False, True])
def test_weights_and_rows_cover_batches_with_demonstrations(by_demos: bool) -> None:
    replay, demos = TrajectoryReplayBuffer(seed=0), TrajectoryReplayBuffer(seed=0)
    replay.add_trajectories([block(key) for key in range(4)])
    demos.add_trajectories([block(key) for key in range(4)])  # the same ids and rows as those of the replay buffer
    samplers = [WeightedSampler([UseLimit()], Priorities(alpha=1, beta=1, eps=0)) for _ in range(2)]
    for buffer, sampler in zip((replay, demos), samplers, strict=True):
        sampler.follow(buffer)
        sampler.update(np.repeat(np.arange(4), 8), np.tile(np.arange(8), 4), np.arange(1.0, 33.0))

    shares = {
        "online": Share(replay, weight=3, sampler=samplers[0]),
        "demos": Share(demos, weight=1, sampler=samplers[1] if by_demos else None),
    }
    with ReplayLoader(shares, 24) as loader:
        batches = [next(loader), next(loader)]
    batch, count = batches[0], 24
    counts: dict[tuple[bool, int], int] = {}
    for each in batches:
        codes = [int(value) % 100_000 for value in rewards(each)]
        rows = [(place >= 18, code // 1000, code % 1000) for place, code in enumerate(codes)]
        for key in {row[:2] for row in rows}:
            counts[key] = counts.get(key, 0) + 1
        weighted = [not demo or by_demos for demo, _, _ in rows]
        uses = [counts[row[:2]] if known else 0 for row, known in zip(rows, weighted, strict=True)]
        assert each.drawn.uses is not None
        assert each.drawn.probabilities is not None
        assert each.drawn.uses.tolist() == uses
        chances = [
            (8 * key + at + 1) / 528 if known else 1 / 32 for (_, key, at), known in zip(rows, weighted, strict=True)
        ]
        assert each.drawn.probabilities.tolist() == pytest.approx(chances)
    assert batch.weights is not None
    assert len(rewards(batch)) == len(batch.drawn) == len(batch.weights) == count
    ours = batch.drawn.ids >= 0
    assert ours.tolist() == [True] * (count - count // 4) + [False] * (count // 4)
    assert (np.ptp(batch.weights.numpy()[~ours]) == 0) != by_demos
    before = samplers[1].state_dict()["priorities"]
    assert replay.update_priorities(samplers[0], batch.drawn, np.full(count, 100.0)) == 0
    drawn = set(zip(batch.drawn.ids[ours].tolist(), batch.drawn.samples[ours].tolist(), strict=True))
    kept = samplers[0].state_dict()["priorities"].reshape(4, 8)
    assert {tuple(row) for row in (kept == 100).nonzero().tolist()} == drawn
    assert torch.equal(samplers[1].state_dict()["priorities"], before)
    assert batch.sources.tolist() == [0] * 18 + [1] * 6
    assert batch.parts["online"].ids.tolist() == batch.drawn.ids[:18].tolist()
    of_demos = batch.parts["demos"]
    assert rewards(batch)[18:] == (1000 * of_demos.ids + of_demos.samples).tolist()
    if by_demos:
        assert demos.update_priorities(samplers[1], of_demos, np.full(6, 100.0)) == 0
        with pytest.raises(ConfigurationError, match="rows are of another buffer"):
            replay.update_priorities(samplers[0], of_demos, np.full(6, 100.0))


@pytest.mark.parametrize("reuse", [False, True])
def test_rollouts_and_demonstrations_give_what_both_have(reuse: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As RLinf's workers record them: demonstrations without policy versions."""
    replay, demos = TrajectoryReplayBuffer(seed=0), TrajectoryReplayBuffer(seed=0)
    replay.add_trajectories([dataclasses.replace(block(key), versions=torch.ones(4, 2, 1)) for key in range(3)])
    demos.add_trajectories([dataclasses.replace(block(100), actions=torch.zeros(4, 2, 3))])
    shares = {"online": Share(replay), "demos": Share(demos)}
    with ReplayLoader(shares, 6, common_columns=True, reuse=reuse, rank=(0, 6)) as loader:
        for batch in itertools.islice(loader, 6):
            assert set(batch) == {"rewards", "curr_obs"}
            assert len(rewards(batch)) == 1
    messages = [record.message for record in caplog.records if "differ" in record.message]
    assert len(messages) == 1
    assert "differ in actions, versions" in messages[0]
    for kind in (ReplayBufferDataset, PreloadReplayBufferDataset):
        named = {"batch_size": 7, "min_replay_buffer_size": 1, "min_demo_buffer_size": 1, "prefetch_size": 3}
        dataset = kind(replay_buffer=replay, demo_buffer=demos, **named)
        batch = next(iter(DataLoader(dataset, batch_size=1, num_workers=0, collate_fn=replay_buffer_collate_fn)))
        assert set(batch) == {"rewards", "curr_obs"}
        assert [value >= 100_000 for value in rewards(batch)] == [False] * 3 + [True] * 3
        dataset.close()


def test_columns_that_differ_between_replay_and_demonstrations_are_named(tmp_path: Path) -> None:
    replay, demos = TrajectoryReplayBuffer(seed=0), TrajectoryReplayBuffer(seed=0)
    replay.add_trajectories([block(0)])
    demos.add_trajectories([block(1, width=3)])
    with (
        ReplayLoader({"online": Share(replay), "demos": Share(demos)}, 4) as loader,
        pytest.raises(
            SchemaMismatchError,
            match=r"online, demos differ in curr_obs\.s, rewards "
            r"\(curr_obs\.s: float32\[1\] in online, float32\[3\] in demos\)",
        ),
    ):
        next(loader)


def test_it_waits_until_both_buffers_are_filled() -> None:
    replay, demos = TrajectoryReplayBuffer(seed=0), TrajectoryReplayBuffer(seed=0)
    loader = ReplayLoader({"online": Share(replay, min_size=2), "demos": Share(demos)}, 4)
    waits_for(loader, "online has 0 of 2 .*demos has 0 of 1 ")
    replay.add_trajectories([block(0), block(1)])
    demos.add_trajectories([block(7)])
    assert rewards(next(loader))[2:] != []
    loader.close()
    with pytest.raises(StoreClosedError):
        next(loader)


def test_a_trajectory_that_is_evicted_between_draw_and_read_is_drawn_anew_and_no_row_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, evicted = store(), list[int]()
    genuine = buffer.read

    def evict_first(rows: Any, **options: Any) -> dict[str, Any]:
        if not evicted:
            evicted.append(int(rows.ids[0]))
            buffer.evict(evicted)
        return genuine(rows, **options)

    monkeypatch.setattr(buffer, "read", evict_first)
    with ReplayLoader(buffer, 8, sampler=EpochSampler(epochs=1), prefetch=1) as loader:
        seen = [value for batch in loader for value in rewards(batch)]
        assert loader.figures()["batches_redrawn"] == 1
    assert sum("redrawn" in message for message in caplog.messages) == 1
    assert sorted(seen) == [1000.0 * key + row for key in range(10) if key not in evicted for row in range(8)]


def waits_for(loader: Any, words: str) -> None:
    """Ask for batches until the loader says in these words what it waits for."""

    def says() -> bool:
        with pytest.raises(TimeoutError) as raised:
            next(loader)
        return re.search(words, str(raised.value)) is not None

    loader._timeout = 0.05
    wait_until(says)
    loader._timeout = 600


def ready(loader: Any, depth: int) -> None:
    next(loader)
    wait_until(lambda: loader.figures()["batches_ready"] == depth)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("make", [EpochSampler, lambda: None])
def test_batches_that_are_ready_lose_what_is_evicted_as_they_do_when_resumed(
    store: Store, depth: int, reuse: bool, make: Callable[[], Sampler | None]
) -> None:
    buffer = store()
    loader = ReplayLoader(buffer, 16, sampler=make(), prefetch=depth, reuse=reuse)
    ready(loader, depth)
    evicted = range(0, 10, 2)
    buffer.evict(list(evicted))
    state = loader.state_dict()
    live = [rewards(next(loader)) for _ in range(8)]
    assert {value // 1000 for batch in live for value in batch}.isdisjoint(evicted)
    assert all(len(batch) == 16 for batch in live)
    assert loader.figures()["batches_redrawn"] == depth
    loader.close()
    with ReplayLoader(buffer, 16, sampler=make(), prefetch=depth) as resumed:
        resumed.load_state_dict(state)
        assert [rewards(next(resumed)) for _ in range(8)] == live


def test_a_reader_of_a_store_that_was_emptied_waits_for_trajectories(tmp_path: Path) -> None:
    with fill(tmp_path, range(3)) as writer:
        writer.flush()
        shown = TrajectoryReplayBuffer.open(tmp_path, seed=1)
        with ReplayLoader(shown, 4, prefetch=1) as loader:
            ready(loader, 1)
            writer.clear()
            writer.close()
            fill(tmp_path, range(0)).close()  # writes an index without entries
            assert shown.refresh()
            waits_for(loader, r"0 of 1 trajectory \(a reader: .* only after refresh\(\)\)")
            with fill(tmp_path, range(9, 10)):
                assert shown.refresh()
            assert min(rewards(next(loader))) >= 9000


def test_rows_are_looked_up_again_only_after_a_trajectory_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, looked = store(), list[int]()
    genuine = buffer._sampling.readable
    monkeypatch.setattr(buffer._sampling, "readable", lambda drawn: looked.append(len(drawn)) or genuine(drawn))
    with ReplayLoader(buffer, 16, prefetch=2) as loader:
        ready(loader, 2)
        looked.clear()
        for number in range(9):
            buffer.add_trajectories([block(20 + number)])
            next(loader)
        assert looked == []
        buffer.evict([0])
        next(loader)
        assert looked


def test_an_error_reaches_the_consumer_every_time_and_no_thread_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = store()
    before = _prefetchers()
    loader = ReplayLoader(buffer, 8)
    next(loader)

    def unreadable(rows: Any, **options: Any) -> dict[str, Any]:
        raise TrajectoryUnavailableError("always")

    monkeypatch.setattr(buffer, "read", unreadable)
    with pytest.raises(TrajectoryUnavailableError, match="always"):
        list(itertools.islice(loader, 10))
    with pytest.raises(TrajectoryUnavailableError, match="always"):
        next(loader)
    loader.close()
    assert _prefetchers() <= before


@pytest.mark.parametrize("resumed", [False, True])
def test_a_sampler_that_has_used_up_all_waits_for_more_and_keeps_its_demonstrations(
    tmp_path: Path, resumed: bool
) -> None:
    """No draw is wasted meanwhile: each demonstration transition is used once, in some batch."""

    def make(replay: TrajectoryReplayBuffer) -> ReplayLoader:
        shares = {
            "online": Share(replay, sampler=WeightedSampler([UseLimit(max_uses=1)])),
            "demos": Share(reader(tmp_path / "demos"), sampler=EpochSampler()),
        }
        return ReplayLoader(shares, 8, prefetch=1, timeout=600)

    fill(tmp_path / "demos", range(100, 104)).close()
    with fill(tmp_path / "replay", range(1)) as replay:
        loader = make(replay)
        batches = [rewards(next(loader))]
        for key in range(1, 8):
            waits_for(loader, "online: cannot sample: none of 1 trajectory is left to draw from after uses")
            if resumed:
                state = loader.state_dict()
                loader.close()
                loader = make(replay)
                loader.load_state_dict(state)
            replay.evict([key - 1])
            replay.add_trajectories([block(key)])
            batches.append(rewards(next(loader)))
        loader.close()
    assert [{value // 1000 for value in batch[:4]} for batch in batches] == [{key} for key in range(8)]
    assert sorted(value for batch in batches for value in batch[4:]) == sorted(
        value for key in range(100, 104) for value in block(key).rewards.reshape(-1).tolist()
    )


@pytest.mark.parametrize("where", ["saved point", "worker"])
def test_too_few_trajectories_or_a_used_up_sampler_are_an_error_where_no_more_can_come(
    store: Store, where: str
) -> None:
    writer = store()
    writer.points.pin("end")
    path, pin = Path(str(writer._path)), "end" if where == "saved point" else None
    buffer = TrajectoryReplayBuffer.open(path, pin=pin, seed=1)
    loader = ReplayLoader(buffer, 8, sampler=WeightedSampler([UseLimit(max_uses=1)]), timeout=600)
    few = ReplayLoader({"demos": Share(buffer, min_size=11)}, 8, timeout=600)
    for batches, message in (
        (loader, "none of 10 trajectories is left to draw from after uses"),
        (few, r"demos has 10 of 11 trajectories.*, and a .* gets no more"),
    ):
        worker = DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="fork")
        refused(batches if pin else worker, message, EmptyBufferError)
    loader.close()


def test_torchdatas_stateful_loader_goes_on_where_it_was(store: Store, tmp_path: Path) -> None:
    store().close()

    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(ReplayLoader(reader(tmp_path / "replay"), 8), batch_size=None, num_workers=0)

    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    expected = [rewards(next(batches)) for _ in range(5)]
    other = make()
    other.load_state_dict(state)
    assert [rewards(batch) for batch in itertools.islice(other, 5)] == expected


@pytest.mark.parametrize("kind", [ReplayBufferDataset, PreloadReplayBufferDataset])
def test_attributes_of_rlinfs_datasets_may_be_set_at_any_time(store: Store, kind: type[ReplayBufferDataset]) -> None:
    dataset = kind(store(), None, 8, 100, 0)
    later = threading.Timer(0.2, setattr, (dataset, "min_replay_buffer_size", 1))
    later.start()
    batches = iter(dataset)
    assert len(rewards(next(batches))) == 8
    dataset.batch_size = 5
    assert 5 in {len(rewards(next(batches))) for _ in range(8)}
    dataset.replay_buffer = store("demos", range(100, 104))
    assert min(rewards(next(batches))) >= 100_000
    dataset.batch_size = 0
    with pytest.raises(ConfigurationError, match="batch_size: 0"):
        next(batches)
    later.join()
    dataset.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_device(store: Store) -> None:
    rollouts = in_memory([AgentTrajectory(input_ids=torch.arange(3 + key)) for key in range(20)])
    with TokenLoader(rollouts, 50, device="cuda", prefetch=3) as loader:
        for [pack] in itertools.islice(loader, 20):
            assert pack["input_ids"].is_cuda
            lengths = pack["lengths"].tolist()
            assert pack["input_ids"].tolist() == [token for length in lengths for token in range(length)]
    buffer = store()
    state = buffer.state_dict()
    expected = [rewards(buffer.sample(16)) for _ in range(20)]
    buffer.load_state_dict(state)
    with ReplayLoader(buffer, 16, device="cuda", prefetch=3) as loader:
        for values in expected:
            batch = next(loader)
            assert batch["rewards"].is_cuda
            assert batch["rewards"].reshape(-1).tolist() == values


def of_tokens(buffer: TrajectoryReplayBuffer, size: int, **options: Any) -> TokenLoader:
    return TokenLoader(buffer, 10, batch_size=1, **options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (ReplayLoader, {"rank": (0, 2), "sampler": WeightedSampler(priorities=Priorities())}, "training would change"),
        (ReplayLoader, {"sampler": WeightedSampler(unit="trajectory")}, "draws whole trajectories, and these batches"),
        (ReplayLoader, {"rank": (2, 2)}, r"rank: \(2, 2\)"),
        (ReplayLoader, {"rank": (0, 5)}, "at least the number of ranks"),
        (ReplayLoader, {"device": "meta"}, "must be the CPU or an available CUDA device"),
        (ReplayLoader, {"common_columns": True}, "common_columns: has no effect on a single buffer"),
        (ReplayLoader, {"prefetchs": 3}, "ReplayLoader has no option 'prefetchs'; there are"),
        (of_tokens, {"layout": "ragged"}, "layout: 'ragged', must be one of 'packed', 'padded'"),
        (of_tokens, {"long": "cut"}, "long: 'cut', must be one of 'refuse', 'skip', 'alone'"),
        (of_tokens, {"pad_id": 3}, "pad_id: 3, has no effect on packed batches"),
        (of_tokens, {"rank": (0, 2)}, "at least the number of ranks, 2"),
        (of_tokens, {"sampler": WeightedSampler()}, "sampler: draws transitions, and these batches are made of whole"),
        (of_tokens, {"demos": None}, "TokenLoader has no option 'demos'; there are"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(TrajectoryReplayBuffer(), 4, **options)


def test_a_buffer_that_is_closed_while_a_loader_waits_for_it_ends_the_waiting() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    with ReplayLoader(buffer, 8) as loader:
        threading.Timer(0.1, buffer.close).start()
        with pytest.raises(StoreClosedError, match=r"buffer .*closed"):
            next(loader)


def test_waiting_without_end_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prefetch, "_SAYS_AFTER", 0.05)
    buffer = TrajectoryReplayBuffer(seed=0)
    with ReplayLoader(buffer, batch_size=4) as loader, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, loader)
        wait_until(lambda: "are the buffers filled" in caplog.text)
        buffer.add_trajectories([block(1)])
        assert len(waiting.result(600)["rewards"]) == 4
    assert caplog.text.count("no batch for 0.05 s") == 1


def test_ranks_of_a_store_without_a_seed_are_refused() -> None:
    buffer = TrajectoryReplayBuffer(seed=None)
    with pytest.raises(ConfigurationError, match=r"rank: \(1, 2\) .*no seed"):
        ReplayLoader(buffer, 8, rank=(1, 2))
    with pytest.raises(ConfigurationError, match="the buffer has no seed"):
        ReplayLoader({"a": Share(TrajectoryReplayBuffer(seed=1)), "b": Share(buffer)}, 8, rank=(1, 2))
    ReplayLoader(buffer, 8, rank=(1, 2), stores="per_rank").close()


def test_a_loader_that_has_begun_tells_forked_workers_what_they_lack(store: Store) -> None:
    path = Path(str(store()._path))
    with ReplayLoader(reader(path), 8) as plain:
        expected = [rewards(next(plain)) for _ in range(6)]
    loader = ReplayLoader(reader(path), 8)
    assert rewards(next(loader)) == expected[0]
    state = loader.state_dict()
    workers = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")
    refused(workers, "was started in the parent process")
    loader._running._changed.acquire()  # type: ignore[union-attr]  # by the thread, say, when the process forks
    child = os.fork()
    if not child:
        try:
            with pytest.raises(ConfigurationError, match="was started in the parent process"):
                loader.state_dict()  # it would lack the prefetched batches
            loader.load_state_dict(state)
            assert [rewards(batch) for batch in itertools.islice(loader, 5)] == expected[1:]
            os._exit(0)
        finally:
            os._exit(1)
    loader._running._changed.release()  # type: ignore[union-attr]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.load_state_dict(loader.state_dict())
    assert [rewards(batch) for batch in itertools.islice(workers, 5)] == expected[1:]
    loader.close()


def _prefetchers() -> int:
    return sum(thread.name == "trajstore-prefetch" for thread in threading.enumerate())


def test_a_loader_that_nobody_holds_ends_its_thread(store: Store) -> None:
    buffer = store()
    before = _prefetchers()
    for _ in range(5):
        next(ReplayLoader(buffer, 8))
    gc.collect()
    wait_until(lambda: _prefetchers() <= before)
    assert _prefetchers() <= before
