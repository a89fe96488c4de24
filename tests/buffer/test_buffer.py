"""The buffer for users: draws, memory, receipts, errors."""

from __future__ import annotations

import logging
import threading
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.stores import add_each, contents_of, opened, writer_to
from tests.support.equality import same
from tests.support.formats import random_tensor
from tests.support.witness import check_batch, check_trajectory, difference, witness
from trajstore import Trajectory, TrajectoryReplayBuffer, WriterOptions, errors
from trajstore._core.columns.fields import join_name, walk
from trajstore._core.columns.schema import dtypes
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats import FORMATS
from trajstore._core.store.index import TrajectoryIndex


def uncached(path: Path, fmt: str = "pt") -> TrajectoryReplayBuffer:
    return opened(path, trajectory_format=fmt, enable_cache=False, writer=WriterOptions(commit_interval=0.0))


def flat(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {join_name(path): value for path, value in walk(batch)}


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_dtype_and_empty_dimensions(tmp_path: Path, fmt: str) -> None:
    generator = torch.Generator().manual_seed(7)
    values = {name: random_tensor((3, 2, 4), dtype, generator) for name, dtype in dtypes().items()}
    rewards = torch.arange(6.0).reshape(3, 2, 1)
    trajectory = Trajectory(rewards=rewards, curr_obs=values, next_obs={"none": torch.zeros(3, 2, 0, 5)})
    with uncached(tmp_path, fmt) as buffer:
        buffer.add_trajectories([trajectory])
        buffer.flush()
        assert difference(buffer.get(0), trajectory) is None
        batch = buffer.sample(6)
        assert batch["next_obs"]["none"].shape == (6, 0, 5)
        drawn = batch["rewards"].reshape(-1).long()
        for name, value in values.items():
            assert same(batch["curr_obs"][name], value.reshape(6, 4)[drawn]), name


# -- sampling ---------------------------------------------------------------------------------------


def test_more_than_there_is_is_cut_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([witness(0)])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert len(buffer.sample(1000)["rewards"]) == buffer.total_samples
    assert len([record for record in caplog.records if "1000" in record.getMessage()]) == 1


class WithoutTruth(UserDict[str, Any]):
    """Has no truth value, as a TensorDict."""

    def __bool__(self) -> bool:
        raise RuntimeError("converting to a boolean value is not permitted")


def test_columns_and_out() -> None:
    buffer = TrajectoryReplayBuffer(seed=3)
    some = [witness(key) for key in range(5)]
    for trajectory in some:
        nested = WithoutTruth({"tag": trajectory.curr_obs["tag"]})
        trajectory.forward_inputs = WithoutTruth({"nested": nested})  # type: ignore[assignment]
    buffer.add_trajectories(some)
    returned = buffer.get(3)
    assert isinstance(returned, Trajectory)
    assert torch.equal(returned.forward_inputs["nested"]["tag"], some[3].curr_obs["tag"])
    names = ["curr_obs.tag", "rewards"]
    out = {"curr_obs.tag": torch.full((20,), -1), "rewards": torch.zeros(20, 1, dtype=torch.float64)}
    batch = buffer.sample(8, columns=names, out=out)
    assert sorted(flat(batch)) == names
    check_batch(batch)
    assert flat(batch)["curr_obs.tag"].data_ptr() == out["curr_obs.tag"].data_ptr()
    assert out["curr_obs.tag"][8:].eq(-1).all()
    with pytest.raises(errors.SchemaMismatchError, match="no_such"):
        buffer.sample(1, columns=["no_such"])
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(20), torch.zeros(20, 2, dtype=torch.int64)):
        with pytest.raises(errors.ConfigurationError, match=r"curr_obs\.tag"):
            buffer.sample(8, columns=names, out={**out, "curr_obs.tag": wrong})


# -- adding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: TrajectoryReplayBuffer(sample_window_size=0), uncached])
def test_the_callers_tensors_may_change(tmp_path: Path, make: Callable[[Path], TrajectoryReplayBuffer]) -> None:
    with make(tmp_path) as buffer:
        trajectories = [witness(key) for key in range(5)]
        buffer.add_trajectories(trajectories)
        for trajectory in trajectories:
            for _, value in walk({k: v for k, v in vars(trajectory).items() if v is not None}):
                if isinstance(value, torch.Tensor):
                    value.zero_()
        check_batch(buffer.sample(30))
        buffer.flush()
        assert [check_trajectory(buffer.get(number)) for number in range(5)] == list(range(5))


def test_what_has_nothing_in_it_is_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = [Trajectory(), Trajectory(rewards=torch.zeros(0, 2, 1)), Trajectory(prev_logprobs=torch.zeros(4, 0, 1))]
    with opened(tmp_path) as buffer:
        assert buffer.add_trajectories(nothing) == []
        caplog.clear()
        given = [nothing[0], witness(0), *nothing[1:], witness(1), Trajectory(max_episode_length=3)]
        assert buffer.add_trajectories(given) == [0, 1]
        (message,) = [record.message for record in caplog.records]
        assert "positions 0, 2, 3, 5 of 6 are empty" in message
        assert [check_trajectory(buffer.get(number)) for number in (0, 1)] == [0, 1]


def test_receipts(tmp_path: Path) -> None:
    committed: list[int] = []
    buffer = writer_to(tmp_path, on_commit=committed.extend, writer=WriterOptions(commit_interval=30.0))
    with buffer:
        assert buffer.get_stats()["committed"] == -1
        ids = buffer.add_trajectories([witness(key) for key in range(3)])
        assert buffer.wait(ids, timeout=0.01) is False
        assert buffer.get_stats()["pending_bytes"] > 0
        buffer.flush()
        assert buffer.wait(ids) is True
        assert buffer.get_stats()["committed"] == 2
        assert buffer.get_stats()["pending_bytes"] == 0
    assert committed == ids


def test_a_callback_that_raises_undoes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, on_commit=mock.Mock(side_effect=RuntimeError("of the user"))) as buffer:
        add_each(buffer, [0])
        assert buffer.get_stats()["committed"] == 0
    assert contents_of(tmp_path) == [0]


def test_flush_gives_up_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, publish = threading.Event(), LocalDirectory.publish
    with uncached(tmp_path) as buffer:
        monkeypatch.setattr(LocalDirectory, "publish", lambda *given: publish(*given) if go_on.wait() else None)
        try:
            buffer.add_trajectories([witness(0)])
            with pytest.raises(TimeoutError):
                buffer.flush(timeout=0.05)
            check_batch(buffer.sample(1))
        finally:
            go_on.set()
        buffer.flush()
        assert buffer.get_stats()["committed"] == 0


def test_memory_of_waiting_writes_is_bounded(tmp_path: Path) -> None:
    options = WriterOptions(max_pending_bytes=20_000, commit_interval=60.0)
    with opened(tmp_path, writer=options) as buffer:
        for key in range(100):
            buffer.add_trajectories([witness(key)])
            assert buffer.get_stats()["pending_bytes"] <= 20_000
        assert buffer.get_stats()["committed"] > 0  # writing began although the interval is long


def test_fewer_bytes_reach_no_lost_trajectory() -> None:
    small = TrajectoryReplayBuffer(cache_bytes=20_000)
    small.add_trajectories([witness(key) for key in range(100)])
    whole = [check_trajectory(item) for item in small.sample_trajectories(1000)]
    keys = set(whole)
    assert len(keys) == len(whole)
    assert keys == set(range(min(keys), 100))
    assert {key for _ in range(8) for key in check_batch(small.sample(64)).tolist()} <= keys
    assert 0 < small.get_stats()["cache_bytes"] <= 20_000
    assert len(small) == 100


# -- closing --------------------------------------------------------------------------


def test_closing(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.add_trajectories([witness(0)])
    buffer.close()
    buffer.close()
    calls: list[Any] = [
        lambda: buffer.add_trajectories([witness(1)]),
        lambda: buffer.evict([0]),
        lambda: buffer.points.pin("name"),
        lambda: buffer.points.remove("name"),
    ]
    for call in calls:
        with pytest.raises(errors.StoreClosedError):
            call()
    assert contents_of(tmp_path) == [0]


# -- agents -----------------------------------------------------------------------------------------


def test_rollouts_are_added_and_read_while_an_eviction_copies_the_others(tmp_path: Path) -> None:
    copy_others = TrajectoryIndex.remainder
    with uncached(tmp_path) as buffer:
        add_each(buffer, range(6))

        def beside() -> None:
            buffer.add_trajectories([witness(6)])
            assert difference(buffer.get(6), witness(6)) is None
            check_batch(buffer.sample(4))
            ended.set()

        def remainder(index: TrajectoryIndex, *args: Any) -> Any:
            copied = copy_others(index, *args)
            threading.Thread(target=beside).start()
            assert ended.wait(60)  # for ever if the copying holds the lock of the contents
            return copied

        ended = threading.Event()
        with mock.patch.object(TrajectoryIndex, "remainder", remainder):
            buffer.evict([1, 4])
        buffer.add_trajectories([witness(7)])
    assert contents_of(tmp_path) == [0, 2, 3, 5, 6, 7]
