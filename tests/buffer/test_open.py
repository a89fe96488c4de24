"""``TrajectoryReplayBuffer.open``: the simple way to read."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import reader_of, writer_to
from trajstore import Reader, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore.errors import (
    ConfigurationError,
    DescriptorLimitError,
    StoreClosedError,
    StoreError,
    StoreNotFoundError,
    StoreWriteError,
)
from trajstore.operations.conversion import convert


def one(value: float) -> Trajectory:
    return Trajectory(rewards=torch.full((2, 1, 1), value))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with TrajectoryReplayBuffer(seed=7, auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([one(float(number)) for number in range(150)])
        buffer.points.pin("early")
        buffer.add_trajectories([one(150.0)])
    return tmp_path / "store"


def test_the_limit_of_descriptors_is_named(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    calls: list[Callable[[int], Any]] = [
        lambda number: TrajectoryReplayBuffer.open(store).close(),
        lambda number: writer_to(store).close(),
        lambda number: annotate(store, 0, {"judge": 1.0}),
        lambda number: convert(store, tmp_path / f"converted-{number}", "pt"),
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed: dict[int, str] = {}
    for (at, call), spare in itertools.product(enumerate(calls), range(7)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 9, hard))
        used = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    used.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(spare):
                os.close(used.pop())
            call(spare)
        except (DescriptorLimitError, StoreWriteError) as error:
            failed[at] = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in used:
                os.close(descriptor)
    assert [*failed] == [*range(len(calls))]
    assert all("too many open files: this process may open" in text for text in failed.values())


def test_a_reader_has_no_methods_that_write(store: Path) -> None:
    with TrajectoryReplayBuffer.open(store) as reader:
        for opened in (reader, pickle.loads(pickle.dumps(reader))):
            assert type(opened) is Reader
            for name in ("add_trajectories", "evict", "flush", "points", "mirror", "load_checkpoint"):
                assert not hasattr(opened, name), name
            assert len(opened) == 151


def test_a_reader_that_is_sent_reads_the_same_store_wherever_it_arrives(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with writer_to(elsewhere / "store") as other:
        other.add_trajectories([one(-1.0)] * 3)
        with pytest.raises(StoreError, match=r"load_checkpoint.*refresh.*directory per process"):
            pickle.dumps(other)
    with reader_of(elsewhere / "store") as buffer:
        buffer.add_trajectories([one(4.0)])
        with pytest.raises(StoreError, match="save_checkpoint"):
            pickle.dumps(buffer)
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer.open("store") as reader:
        sent = pickle.dumps(reader)
        monkeypatch.chdir(elsewhere)
        with pickle.loads(sent) as arrived:
            assert arrived._store_ids == reader._store_ids
            assert float(arrived.get(150).rewards[0]) == 150.0
    store.rename(tmp_path / "before")
    (elsewhere / "store").rename(store)
    [store_id] = reader._store_ids
    with pytest.raises(StoreNotFoundError, match=rf"reads the store {store_id}, which is no longer at this path"):
        pickle.loads(sent)


def test_a_store_whose_first_files_come_while_it_is_opened(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalDirectory.names
    for name in ("metadata.json", "trajectory_index.json"):
        (store / name).rename(store / f"{name}.tmp")

        def come(self: LocalDirectory, below: str = "", name: str = name) -> list[str]:
            names = real(self, below)
            if below == "shards" and not (store / name).exists():  # right after they were seen to be absent
                (store / f"{name}.tmp").rename(store / name)
            return names

        with monkeypatch.context() as patch:
            patch.setattr(LocalDirectory, "names", come)
            assert len(Catalog.open(open_directory(store)).index) == 151


def test_what_lies_further_down_is_named(store: Path) -> None:
    (store.parent / "run").mkdir()
    store.rename(store.parent / "run" / "replay")
    with pytest.raises(StoreNotFoundError, match=r"in its folders are .*/run/replay: load one by its path"):
        TrajectoryReplayBuffer.open(store.parent)


def test_an_option_that_the_file_system_does_not_know_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'range_read'; trajstore's own are cache_dir, .*range_reads"):
        TrajectoryReplayBuffer.open("s3://bucket/run", storage_options={"range_read": True})


def test_a_closed_reader_whose_files_were_deleted_says_that_it_was_closed(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, enable_cache=False) as writer:
        writer.add_trajectories([one(0.0)])
        writer.flush()
        reader = TrajectoryReplayBuffer.open(tmp_path)
        reader.close()
        writer.evict([0])
        writer.flush()
        for call in (lambda: reader.sample(1), lambda: reader.get(0), lambda: reader.sample_trajectories(1)):
            with pytest.raises(StoreClosedError, match="the buffer was closed"):
                call()
