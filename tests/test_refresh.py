"""``refresh()``: what it finds, what it costs, and what stays valid meanwhile."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from trajstore import TrajectoryReplayBuffer
from trajstore.testing.witness import check_batch, check_trajectory, witness


def writer_to(path: Path, **options: object) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)  # type: ignore[arg-type]


def reader_of(path: Path) -> TrajectoryReplayBuffer:
    reader = TrajectoryReplayBuffer(sample_window_size=0)
    reader.load_checkpoint(path)
    return reader


def test_a_store_that_was_empty_when_it_was_loaded_is_followed(tmp_path: Path) -> None:
    with writer_to(tmp_path) as source:
        reader = reader_of(tmp_path)
        assert not reader.refresh()
        source.add_trajectories([witness(0)])
        source.flush()
        assert reader.refresh()
        assert check_trajectory(reader.get(0)) == 0
        assert not reader.refresh()
        reader.close()


def test_a_store_that_was_cleared_is_followed(tmp_path: Path) -> None:
    with writer_to(tmp_path) as source:
        source.add_trajectories([witness(0)])
        source.flush()
        reader = reader_of(tmp_path)
        source.clear()
        assert reader.refresh()
        assert len(reader) == 0
        source.add_trajectories([witness(1)])
        source.flush()
        assert reader.refresh()
        assert check_trajectory(reader.get(1)) == 1
        reader.close()


def test_all_ranks_of_a_run_are_followed_also_empty_ones(tmp_path: Path) -> None:
    ranks = [writer_to(tmp_path / f"rank_{rank}") for rank in range(2)]
    ranks[0].add_trajectories([witness(0)])
    ranks[0].flush()
    reader = reader_of(tmp_path)
    ranks[1].add_trajectories([witness(1)])
    ranks[1].flush()
    assert reader.refresh()
    assert sorted(check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()) == [0, 1]
    reader.close()
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_an_empty_store_is_followed(tmp_path: Path, rank: int) -> None:
    with writer_to(tmp_path) as source:
        reader = TrajectoryReplayBuffer(sample_window_size=0)
        reader.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=2)
        source.add_trajectories([witness(key) for key in range(4)])
        source.flush()
        assert reader.refresh()
        assert [check_trajectory(reader.get(2 * rank + at)) for at in range(2)] == [2 * rank, 2 * rank + 1]
        reader.close()


def write_when_told(path: Path, opened: Event, go: Event, done: Event, stop: Event) -> None:
    torch.set_num_threads(1)
    with writer_to(path) as source:
        opened.set()
        assert go.wait(60)
        source.add_trajectories([witness(key) for key in range(5)])
        source.flush()
        done.set()
        assert stop.wait(60)


def test_a_writer_in_another_process_is_followed_from_the_empty_store_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.crash.warm"])
    opened, go, done, stop = (context.Event() for _ in range(4))
    child = context.Process(target=write_when_told, args=(tmp_path, opened, go, done, stop), daemon=True)
    child.start()
    assert opened.wait(60)
    reader = reader_of(tmp_path)
    assert not reader.refresh()
    go.set()
    assert done.wait(60)
    assert reader.refresh()
    check_batch(reader.sample(20))
    assert [check_trajectory(reader.get(number)) for number in range(5)] == list(range(5))
    stop.set()
    child.join(30)
    assert child.exitcode == 0
    reader.close()
