"""Readers that follow a live writer: they never see a torn or vanished row. Workers that are forked or spawned."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import add_each, opened, reader_of, writer_to
from tools.crash.forked import forking
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions, errors
from trajstore.buffer.backing import StoreBacking
from trajstore.files.local import LocalDirectory
from trajstore.store.catalog import Catalog
from trajstore.testing.waiting import wait_until
from trajstore.testing.witness import check_batch, check_trajectory, witness

READERS = 2


def write(path: Path, started: Event, stop: Event, fmt: str) -> None:
    """Add and evict, with snapshots in between, until told to stop."""
    torch.set_num_threads(1)
    with TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=path,
        trajectory_format=fmt,
        retention=Retention(max_trajectories=30),
        writer=WriterOptions(commit_interval=0.005, shard_bytes=1 << 16, snapshot_bytes=1 << 15),
    ) as buffer:
        key = 0
        while not stop.is_set():
            buffer.add_trajectories([witness(key + i) for i in range(3)])
            key += 3
            if key % 30 == 0:
                buffer.flush()
                started.set()
            time.sleep(0.002)


def follow(path: Path, ready: Any, changed: Event, stop: Event, results: Any, number: int) -> None:
    """Sample and read whole trajectories, seeing new commits now and then, until told to stop."""
    torch.set_num_threads(1)
    buffer = TrajectoryReplayBuffer(seed=number, sample_window_size=0, enable_cache=number % 2 == 0)
    batches = changes = 0
    newest = -1
    try:
        buffer.load_checkpoint(path)
        while not stop.is_set():
            if buffer.refresh():
                changes += 1
                changed.set()
            ids = buffer.trajectory_ids
            assert int(ids[-1]) >= newest, "went back in time"
            newest = int(ids[-1])
            for _ in range(5):
                check_batch(buffer.sample(64))
                batches += 1
                ready.release()
            for trajectory_id in ids[[0, -1]].tolist():
                assert check_trajectory(buffer.get(trajectory_id)) == trajectory_id
        results.put((number, batches, changes, newest, ""))
    except BaseException as error:  # told to the parent, whatever it is
        results.put((number, batches, changes, newest, f"{type(error).__name__}: {error}"))


def follow_for(path: Path, seconds: float, fmt: str) -> None:
    context = forking()
    started, changed, enough, stop = (context.Event() for _ in range(4))
    results = context.Queue()
    ready = [context.Semaphore(0) for _ in range(READERS)]
    readers = [
        context.Process(target=follow, args=(path, ready[i], changed, stop, results, i), daemon=True)
        for i in range(READERS)
    ]
    producer = context.Process(target=write, args=(path, started, enough, fmt), daemon=True)
    producer.start()
    assert started.wait(60)
    for reader in readers:
        reader.start()
    for semaphore in ready:
        assert semaphore.acquire(timeout=60)
    time.sleep(seconds)  # how much is tried, not how fast
    assert changed.wait(60)
    enough.set()
    producer.join(60)
    assert producer.exitcode == 0
    stop.set()
    found = [results.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join(60)
    assert [problem for *_, problem in found] == [""] * READERS
    for _, batches, _, newest, _ in found:
        assert batches > 0
        assert newest >= 29
    assert any(changes for _, _, changes, _, _ in found)


def test_readers_follow_a_writer_that_evicts(tmp_path: Path) -> None:
    follow_for(tmp_path / "store", 1.0, "zarr")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["pt", "zarr"])
def test_readers_follow_for_a_minute(tmp_path: Path, fmt: str) -> None:
    follow_for(tmp_path / "store", 60.0, fmt)


def test_nobody_samples_what_was_added_and_evicted_between_two_refreshes(tmp_path: Path) -> None:
    """Files of these are gone before the reader hears of them: it must never show a moment at which they were there."""

    class Watched:
        """A lock after which, each time that it comes free, everything that is shown is read."""

        def __init__(self, lock: Any) -> None:
            self._lock, self._depth, self.reads = lock, 0, 0
            self.acquire, self.release = lock.acquire, lock.release  # what a fork asks for

        def __enter__(self) -> None:
            self._lock.__enter__()
            self._depth += 1

        def __exit__(self, *error: object) -> None:
            self._depth -= 1
            self._lock.__exit__(*error)
            if not self._depth and error[0] is None:
                self._depth += 1  # what reads takes it too
                self.reads += 1
                for number in reader.trajectory_ids.tolist():
                    check_trajectory(reader.get(number))
                self._depth -= 1

    with writer_to(tmp_path, retention=Retention(max_trajectories=2), enable_cache=False) as source:
        add_each(source, range(3))
        reader = reader_of(tmp_path)
        add_each(source, range(3, 9))
        lock = Watched(reader._view.contents.lock)
        reader._view.contents.lock = lock  # type: ignore[assignment]
        assert reader.refresh()
        assert lock.reads > 0
        assert reader.trajectory_ids.tolist() == [7, 8]
        reader.close()


def test_a_snapshot_between_the_two_reads_of_opening(tmp_path: Path) -> None:
    class Interrupted(LocalDirectory):
        def listing(self, below: str = "") -> tuple[list[str], list[str]]:
            if below == "log" and interruptions:
                interruptions.pop()()
            return super().listing(below)

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as source:
        source.add_trajectories([witness(0)])
        source.flush()
        assert isinstance(source._backing, StoreBacking)
        interruptions = [source._backing.writer.log.snapshot]
        catalog = Catalog.open(Interrupted(tmp_path))
        assert interruptions == []
        assert catalog.index["trajectory_id"].tolist() == [0]
        source.add_trajectories([witness(1)])
        source.flush()
        interruptions.append(source._backing.writer.log.snapshot)
        assert catalog.refresh()
        assert catalog.index["trajectory_id"].tolist() == [0, 1]


# -- workers ----------------------------------------------------------------------------------------


def sample_in_child(buffer: TrajectoryReplayBuffer, results: Any) -> None:
    try:
        keys = check_batch(buffer.sample(32))
        try:
            buffer.add_trajectories([witness(1)])
            results.put("adding in a child was possible")
        except errors.StoreClosedError as error:
            results.put("parent process" in str(error) and len(keys) == 32)
        buffer.close()
    except BaseException as error:  # told to the parent, whatever it is
        results.put(repr(error))


def test_forked_workers_sample_while_the_parent_goes_on_adding(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    stop = threading.Event()
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=0)) as buffer:
        buffer.add_trajectories([witness(key) for key in range(8)])
        check_batch(buffer.sample(8))

        def add() -> None:
            key = 8
            while not stop.is_set():
                buffer.add_trajectories([witness(key)])
                key += 1

        adder = threading.Thread(target=add)
        adder.start()
        try:
            for _ in range(6):
                results = context.Queue()
                child = context.Process(target=sample_in_child, args=(buffer, results), daemon=True)
                child.start()
                child.join(120)
                hung = child.is_alive()
                child.kill()
                assert not hung, "a lock was held by another thread when the child was forked"
                assert results.get(timeout=60) is True
        finally:
            stop.set()
            adder.join()
        buffer.flush()


def read_in_child(reader: TrajectoryReplayBuffer, gone: Any, results: Any) -> None:
    assert gone.wait(120)
    try:
        results.put(check_trajectory(reader.get(0)))
    except errors.CorruptStoreError as error:
        results.put(str(error))


def test_a_forked_child_is_told_that_its_parent_let_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gone, results = context.Event(), context.Queue()
    with opened(tmp_path) as writer:
        add_each(writer, range(2))
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            child = context.Process(target=read_in_child, args=(reader, gone, results), daemon=True)
            child.start()
            writer.evict([0])
            reader.refresh()
            wait_until(lambda: (writer.flush(), len(list((tmp_path / "shards").iterdir())))[1] == 1)
            gone.set()
            assert "this process was forked, and its parent may have let go of it since" in results.get(timeout=120)
            child.join(60)


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    buffer = opened(tmp_path)
    add_each(buffer, [0])
    stop = context.Event()
    child = context.Process(target=stop.wait, daemon=True)
    child.start()
    buffer.close()
    with opened(tmp_path) as again:
        assert check_trajectory(again.get(0)) == 0
    stop.set()
    child.join(10)
