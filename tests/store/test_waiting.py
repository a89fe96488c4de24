"""Lazily unpacked columns behave like all others, whatever the order of operations."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forging import forged_index
from tests.stores import reader_of, writer_to
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.json_arrays import array_to_json
from trajstore._core.store.sealed import INDEX_NAME
from trajstore._core.store.waiting import LazyColumn
from trajstore.errors import CorruptStoreError
from trajstore.operations.verify import verify


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(task_id=f"task {number}", reward=Reward(outcome=float(number)))


def test_two_threads_may_ask_first_at_once() -> None:
    together = threading.Barrier(2)

    def unpack() -> Any:
        together.wait(600)  # both threads must be able to unpack at once
        return np.arange(5)

    packed = LazyColumn(unpack, 5)
    columns: list[Any] = []
    threads = [threading.Thread(target=lambda: columns.append(packed.column())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert [column.tolist() for column in columns] == [list(range(5))] * 2
    assert packed.column().tolist() == list(range(5)), "not unpacked again"


# -- a store ------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with an empty log that does not go back to the first commit."""
    path = tmp_path / "store"
    for first in (0, 3):
        with writer_to(path) as buffer:
            buffer.add_trajectories([rollout(number) for number in range(first, first + 3)])
    return path


def test_a_reader_that_follows_evictions_has_those_of_what_is_left(store: Path) -> None:
    with writer_to(store) as writer, reader_of(store) as reader:
        for number in range(6, 9):
            writer.evict([number - 6])
            writer.add_trajectories([rollout(number)])
            writer.flush()
            reader.refresh()
        assert reader._uuids.tolist() == writer._uuids.tolist()
        assert [row["task"] for row in reader.query().rows()] == [f"task {number}" for number in range(3, 9)]


def test_ranks_share_a_store(store: Path) -> None:
    ids = []
    for rank in range(4):
        with TrajectoryReplayBuffer.open(store, share=(rank, 4)) as reader:
            ids += reader.trajectory_ids.tolist()
    assert ids == list(range(6))


@pytest.mark.parametrize("name", ["uuid", "task"])
def test_damage_beneath_a_right_checksum_is_told_when_they_are_asked_for(store: Path, name: str) -> None:
    with forged_index(store) as body:
        if name == "uuid":
            body["live"]["columns"]["uuid"]["data"] = "AAAA" * 40
        else:
            body["live"]["facts"]["task"] = array_to_json(np.full(6, 99, np.int32))
    with reader_of(store) as reader:
        assert reader.get(4).task_id == "task 4"
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match=rf"{INDEX_NAME}: index column {name}.*strict=False"):
                reader.query().ids() if name == "task" else reader._uuids
    with pytest.raises(CorruptStoreError, match=INDEX_NAME):
        Catalog.open(open_directory(store))
    with pytest.raises(CorruptStoreError, match=INDEX_NAME):
        writer_to(store)
    assert not verify(store).sound


def test_a_column_that_is_absent_is_told_at_once(store: Path) -> None:
    with forged_index(store) as body:
        del body["live"]["columns"]["uuid"]
    with pytest.raises(CorruptStoreError, match=INDEX_NAME):
        reader_of(store)
