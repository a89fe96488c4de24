"""The index and packed arrays: JSON round trips, and hostile JSON."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.interleaving import interleavings
from tests.support.witness import witness
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.store import json_arrays
from trajstore._core.store.additions import NewEntries, starts_of
from trajstore._core.store.entry_checks import EntryGate, shape_faults
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.index_file import index_from_json, index_to_json
from trajstore._core.store.json_arrays import StringTable, array_to_json
from trajstore.errors import CorruptStoreError


def index_of(ids: list[int]) -> TrajectoryIndex:
    index = TrajectoryIndex()
    for number in ids:
        flat = flatten(witness(number))
        columns = dict(
            NewEntries.of(FlatTrajectories.runs([flat]), [number], number.to_bytes(16, "big"), index.texts).columns
        )
        index.append(columns | starts_of(np.array([flat.extent]), flat.schema.kind) | {"shard": np.zeros(1)})
    return index


def test_a_long_index_comes_back_and_faults_far_in_it_are_found_as_in_one_look() -> None:
    index, count = TrajectoryIndex(), 300_000
    few = index_of([1, 2, 3])
    columns = {name: np.tile(column, count // 3) for name, column in few.take(slice(0, 3)).items()}
    columns |= {"trajectory_id": np.arange(count), "version_high": np.arange(count) + (1 << 40)}
    index.append({**columns, "uuid": np.random.default_rng(0).integers(0, 1 << 62, 2 * count).view("V16")})
    index.texts = few.texts
    again = index_from_json(index_to_json(index), 1)
    for name in COLUMNS:
        assert np.array_equal(again[name], index[name])
    wrong = again.take(slice(0, count))
    wrong["num_samples"][[5, 70_000, 299_999]] += 1
    wrong["steps"][200_000] = 0
    again.adopt(wrong)
    value, checks, gate = index_to_json(again), (lambda block: shape_faults(block, True),), EntryGate(lenient=True)
    assert len(index_from_json(value, 1, checks, gate)) == count - 4
    assert list(gate.left_out) == [5, 70_000, 200_000, 299_999]
    with pytest.raises(CorruptStoreError, match="another number of samples than its steps say: trajectory 5"):
        index_from_json(value, 1, checks)


def test_the_first_commits_of_a_writer_do_not_copy_the_index() -> None:
    index, few = index_from_json(index_to_json(index_of([*range(100)])), 1), index_of([100, 101])
    (before,) = index.by_position("steps")
    index.append(index.translated(few.take(slice(0, 2)), few.texts))
    (after,) = index.by_position("steps")
    assert after is before
    assert index["trajectory_id"].tolist() == [*range(102)]


# -- string tables -----------------------------------------------------------------------------------


def test_a_thread_adds_to_a_table_while_another_adds_or_reads() -> None:
    def adding() -> tuple[Callable[[], int], Callable[[], tuple[int, list[str]]]]:
        table = tables[0] = StringTable()
        table.add("before")
        return lambda: table.add("first"), lambda: (table.add("second"), StringTable.from_json(table.to_json()).texts())

    tables = [StringTable()]
    for first, (second, seen) in interleavings(json_arrays, adding):
        assert (tables[0][first], tables[0][second], len(tables[0])) == ("first", "second", 3)
        assert seen == tables[0].texts()[: len(seen)]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        *((b"abc", ends) for ends in ([1, 0, 3], [1, 2], [1, 2, 4], [-1, 2, 3])),
        *((b"\xff", [1]), ("\N{EURO SIGN}".encode(), [1, 3])),
    ],
)
def test_ends_that_do_not_fit_and_what_is_no_text_are_refused(text: bytes, ends: list[int]) -> None:
    value = {"bytes": array_to_json(np.frombuffer(text, "V1")), "ends": array_to_json(np.array(ends))}
    with pytest.raises(CorruptStoreError, match="string table"):
        StringTable.from_json(value)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@patch("trajstore._core.store.index._FEW_TEXTS", 3)
def test_an_index_that_borrows_arrays_holds_what_one_with_its_own_does(data: st.DataObject) -> None:
    view, store, twin = TrajectoryIndex("slot"), TrajectoryIndex(), TrajectoryIndex()
    flats, number, pending = [flatten(witness(key)) for key in range(3)], 0, 0

    def drop(index: TrajectoryIndex, ids: list[int]) -> None:
        positions = index.find_many(ids)
        positions = positions[positions >= 0]
        copied_before = len(ids) > 1 and index is not twin  # as contents do, to copy without their lock
        index.drop(positions, index.shared().remainder(positions) if copied_before else None)

    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 40))):
            flat = flats[number % 3]
            entry = dict(
                NewEntries.of(
                    FlatTrajectories.runs([flat]), [number], number.to_bytes(16, "big"), view.texts, number
                ).columns
            )
            rows = starts_of(np.array([flat.extent]), flat.schema.kind)
            view.append({**entry, **rows, "slot": np.zeros(1)})
            number, pending = number + 1, pending + 1
        if pending and data.draw(st.integers(0, 4)) == 0:  # the newest could not be written
            drop(view, [number - 1])
            pending -= 1
        count = data.draw(st.integers(0, pending))
        if count:
            columns = view.take(np.arange(view.end - pending, view.end - pending + count))
            del columns["slot"]
            columns |= {"shard": np.full(count, 7), "committed": columns["committed"] + 1000}
            columns |= {name: columns[name] + 5 for name in ("start_samples", "start_extra", "start_document")}
            store.borrow(view, columns["trajectory_id"])
            for index in (store, twin):
                index.append(index.translated(columns, view.texts))
            pending -= count
        ids = twin["trajectory_id"].tolist()
        if data.draw(st.booleans()):
            tags = StringTable()
            values = {"text:tag": np.array([tags.add(f"{key} {number}") for key in ids[::2]], np.int32)}
            for index in (store, twin, view):
                index.note(index.find_many(ids[::2]), values, tags)
        if not ids:  # as contents have after a load: the store's index still has the column
            view.forget_notes()
        gone = data.draw(st.sampled_from([[], ids[:1], ids[: len(ids) // 2], ids[::3], ids]))
        for index in (store, twin, view):
            drop(index, gone)
        assert len(store) == len(twin)
        assert store.total_samples == twin.total_samples
        for name in COLUMNS.keys() - {"weights"}:  # their numbers depend on the table of texts
            assert store[name].tolist() == twin[name].tolist(), name
        left = [index.find_many(twin["trajectory_id"]).tolist() for index in (store, twin)]
        for at, twin_at in zip(*left, strict=True):
            assert (store.entry(at), store.given(at)) == (twin.entry(twin_at), twin.given(twin_at))
