"""Lazily unpacked columns behave like all others, whatever the order of operations."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forging import forged_index
from tests.stores import reader_of, writer_to
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer
from trajstore._core.columns.facts import facts_to_json
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.facts import fact_columns
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.index_file import index_from_json, index_to_json
from trajstore._core.store.packing import pack
from trajstore._core.store.sealed import INDEX_NAME
from trajstore._core.store.waiting import Packed
from trajstore.errors import CorruptStoreError
from trajstore.operations.verify import verify


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(task_id=f"task {number}", reward=Reward(outcome=float(number)))


# -- an index -----------------------------------------------------------------------------------------


def entries(index: TrajectoryIndex, first: int, count: int, scored: bool) -> dict[str, Any]:
    """Return columns of ``count`` entries with facts; ids and UUIDs start at ``first``."""
    facts = [{"task": f"t{n}", **({"reward_x": n / 2} if scored else {})} for n in range(first, first + count)]
    columns: dict[str, Any] = {name: np.zeros(count, dtype) for name, dtype in COLUMNS.items()}
    columns[index.table] = columns.pop("shard")
    columns["weights"][:] = index.texts.add("w")
    columns["uuid"] = np.array([n.to_bytes(16, "big") for n in range(first, first + count)], "V16")
    columns |= {"trajectory_id": np.arange(first, first + count), "num_samples": np.ones(count, np.int64)}
    return columns | fact_columns([(facts_to_json(facts), count)] if count else [(None, 0)], index.texts)


def rows_of(index: TrajectoryIndex) -> list[tuple[Any, ...]]:
    tasks = [index.texts[number] for number in index.fact("task").tolist()]
    uuids = [uuid.tobytes() for uuid in index["uuid"]]
    scores = np.nan_to_num(index.fact("reward_x"), nan=-1.0).tolist()
    return list(zip(index["trajectory_id"].tolist(), uuids, tasks, scores, index["agent"].tolist(), strict=True))


_STEPS = st.sampled_from(["append", "append scored", "oldest", "drop", "slice", "slots", "ask", "renumber", "many"])


@given(st.integers(1, 9), st.lists(st.tuples(_STEPS, st.integers(0, 5)), max_size=8))
def test_an_index_with_columns_that_wait_is_as_one_without(count: int, steps: list[tuple[str, int]]) -> None:
    made = TrajectoryIndex()
    made.append(entries(made, 0, count, True))
    value = orjson.loads(orjson.dumps(index_to_json(made)))
    pair = [index_from_json(value, 1), index_from_json(value, 1, later="index")]
    number = count
    for step, much in steps:
        for at, index in enumerate(pair):
            if step.startswith("append"):
                index.append(entries(index, number, much + 1, "scored" in step))
            elif step == "oldest":
                index.drop_oldest(much)
            elif step == "drop":
                index.drop(index.first + np.flatnonzero(np.arange(len(index)) % 3 == much % 3))
            elif step == "slice":
                pair[at] = index.slice(min(much, len(index)), len(index))
            elif step == "slots" and index.table == "shard":
                pair[at] = index.in_slots(np.array([0, -1], np.int32))
            elif step == "ask":
                assert len(index["uuid"]) == len(index)
            elif step == "renumber":
                index.renumber(index["trajectory_id"] + much)
            elif step == "many":
                for more in range(much):
                    index.append(entries(index, number + more, 1, False))
        number += 20
    eager, late = pair
    assert (late.first, late.end) == (eager.first, eager.end)
    assert rows_of(late) == rows_of(eager)
    taken = [index.take(slice(index.first, index.end)) for index in pair]
    assert taken[0].keys() == taken[1].keys()
    assert all(taken[0][name].tobytes() == taken[1][name].tobytes() for name in taken[0])


def test_two_threads_may_ask_first_at_once() -> None:
    together = threading.Barrier(2)

    def unpack() -> Any:
        together.wait(600)  # both threads must be able to unpack at once
        return np.arange(5)

    packed = Packed(unpack)
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


def test_who_reads_and_samples_does_not_unpack_them(store: Path) -> None:
    with reader_of(store) as reader:
        assert reader.get(4).task_id == "task 4"
        reader.sample_trajectories(3)
        contents = reader._live.contents
        assert "uuid" not in contents.index.unpacked(slice(0, 1))
        assert len(set(reader._uuids.tolist())) == 6
        assert contents.index.unpacked(slice(0, 1)).keys() >= {"uuid"}


def test_a_reader_that_follows_has_them_of_old_and_new(store: Path) -> None:
    with writer_to(store) as writer, reader_of(store) as reader:
        for number in range(6, 9):
            writer.add_trajectories([rollout(number)])
            writer.flush()
            reader.refresh()
        assert "uuid" not in reader._live.contents.index.unpacked(slice(0, 1))
        both = [buffer._uuids.tolist() for buffer in (reader, writer)]
        assert both[0] == both[1]
        assert reader.query().where("task = 'task 7'").ids().tolist() == [7]
        assert reader.query().where("task = 'task 1'").ids().tolist() == [1]


def test_ranks_share_a_store_without_them(store: Path) -> None:
    ids = []
    for rank in range(4):
        with TrajectoryReplayBuffer.open(store, share=(rank, 4)) as reader:
            assert "uuid" not in reader._live.contents.index.unpacked(slice(0, 1))
            ids += reader.trajectory_ids.tolist()
    assert ids == list(range(6))


@pytest.mark.parametrize("name", ["uuid", "task"])
def test_damage_beneath_a_right_checksum_is_told_when_they_are_asked_for(store: Path, name: str) -> None:
    with forged_index(store) as body:
        if name == "uuid":
            body["live"]["columns"]["uuid"]["data"] = "AAAA" * 40
        else:
            body["live"]["facts"]["task"] = pack(np.full(6, 99, np.int32))
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
