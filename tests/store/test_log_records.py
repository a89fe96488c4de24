"""Lines of the commit log and what records say, by hand: no store, no disk."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import orjson
import pytest

from trajstore.columns.conversion import flatten
from trajstore.columns.fields import Axis
from trajstore.columns.schema import ColumnSpec, Schema
from trajstore.errors import CorruptStoreError, UnsafeContentError
from trajstore.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore.store.additions import AddedShard, added_in, added_to_json, by_id, entries_from_json, entries_to_json
from trajstore.store.log_records import (
    decode_each,
    decode_lines,
    encode_line,
    ids_in_words,
    manifest_from_json,
    manifest_to_json,
    natural,
    parse_ranges,
    ranges_of,
    segment_generation,
    segment_name,
)
from trajstore.store.new_entries import NewEntries
from trajstore.store.packing import StringTable
from trajstore.testing.witness import witness

STEP = Schema(
    "step",
    (
        ColumnSpec("actions", "float32", (2,), Axis.SAMPLES),
        ColumnSpec("dones", "bool", (), Axis.FIRST_EXTRA),
    ),
)


def line(body: bytes) -> bytes:
    return b"%08x " % zlib.crc32(body) + body + b"\n"


def manifest(steps: int = 6, extra: int = 8, **changes: Any) -> ShardManifest:
    values: dict[str, Any] = {
        "name": "shard_00000003",
        "format": "pt",
        "schema": STEP,
        "files": (StoredFile("shards/shard_00000003.pt", 1000, 77),),
        "places": (ColumnPlace(0, 64), ColumnPlace(0, 256)),
        "column_crc32": (1, None),
        "rows": (steps, extra),
    }
    return ShardManifest(**values | changes)


def entries(**changes: Any) -> dict[str, Any]:
    """Two trajectories: T = 2, B = 1, E = 1 and T = 2, B = 2, E = 1 (samples 2 + 4; with extra rows 3 + 6)."""
    told: dict[str, Any] = {
        "ids": [[5, 6]],
        "extents": [[2, 1, 1, 0], [2, 2, 1, 0]],
        "max_episode_length": [9, 8],
        "versions": [[1, 2], None],
        "weights": ["a", "b"],
        "uuids": "00" * 16 + "ff" * 16,
    }
    return told | changes


def added(told: dict[str, Any], generation: int = 4, row: int = 0) -> AddedShard:
    return AddedShard(generation, 3, row, manifest(6, 9), told, 7)


# -- lines --------------------------------------------------------------------------------------------


def test_a_line_is_checksum_space_json_line_feed() -> None:
    assert encode_line({"generation": 7, "ids": np.arange(2)}) == line(b'{"generation":7,"ids":[0,1]}')


def test_lines_come_back_with_the_place_where_the_last_one_ends() -> None:
    data = line(b'{"a":1}') + line(b'{"b":2}')
    tail = decode_lines(data, "log/1", offset=100)
    assert tail.records == [{"a": 1}, {"b": 2}]
    assert (tail.end, tail.torn) == (100 + len(data), 0)


@pytest.mark.parametrize(
    "torn", [b"5", line(b'{"b":2}')[:-1], b"00000000 {}\n", b"xxxxxxxx {}\n", line(b"[1]"), line(b"{"), b"\n"]
)
def test_a_torn_end_is_left_out(torn: bytes) -> None:
    whole = line(b'{"a":1}')
    tail = decode_lines(whole + torn, "log/1")
    assert tail.records == [{"a": 1}]
    assert (tail.end, tail.torn) == (len(whole), len(torn))


def test_a_bad_line_before_a_good_one_is_damage_and_named() -> None:
    with pytest.raises(CorruptStoreError, match="log/1: the record at byte 117 is damaged"):
        decode_lines(line(b'{"a":1}') + b"00000000 {}\n" + line(b'{"b":2}'), "log/1", offset=100)


def test_each_line_is_told_whether_good_or_bad() -> None:
    good = line(b'{"a":1}')
    assert list(decode_each(good + b"bad\n" + good + b"torn")) == [
        ({"a": 1}, len(good)),
        (None, len(good) + 4),
        ({"a": 1}, 2 * len(good) + 4),
        (None, 2 * len(good) + 8),
    ]


def test_segments_are_named_by_their_first_generation() -> None:
    assert segment_name(12) == "log/0000000000000012.log"
    assert segment_generation(segment_name(12)) == 12


@pytest.mark.parametrize("name", ["0000000000000012.log", "log/12.log", "log/000000000000001x.log", "log/x/1.log", ""])
def test_other_names_are_no_segments(name: str) -> None:
    assert segment_generation(name) is None


# -- manifests ----------------------------------------------------------------------------------------


def test_a_manifest_comes_back() -> None:
    again = orjson.loads(orjson.dumps(manifest_to_json(manifest(), 0)))
    assert again["schema"] == 0
    assert manifest_from_json(again, [STEP]) == manifest()


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 1},
        {"schema": -1},
        {"schema": True},
        {"rows": [6]},
        {"rows": [6, -1]},
        {"rows": [6, 1.0]},
        {"rows": [1 << 62, 8]},
        {"places": [[0, 64], [1, 0]]},
        {"places": [[0, 960], None]},
        {"column_crc32": [1, "2"]},
        {"name": 3},
        {"files": [["shards/x.pt", 10]]},
        {"files": None},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptStoreError):
        manifest_from_json(manifest_to_json(manifest(), 0) | changes, [STEP])


def test_a_file_outside_the_directory_is_refused() -> None:
    with pytest.raises(UnsafeContentError):
        manifest_from_json(manifest_to_json(manifest(), 0) | {"files": [["../x", 1000, 0]]}, [STEP])


# -- what was added -----------------------------------------------------------------------------------


def test_one_shard_stands_for_itself_and_several_in_a_list() -> None:
    one, other = ({"number": n, "shard": {}, "entries": {}} for n in (3, 4))
    assert added_to_json([], [one]) == {"schemas": [], **one}
    assert added_in(added_to_json([], [one])) == [{"schemas": [], **one}]
    assert added_in(added_to_json([], [one, other])) == [one, other]
    for empty in ([], {}, None):
        with pytest.raises(CorruptStoreError):
            added_in({"shards": empty})


def test_entries_become_columns_with_places_by_axis() -> None:
    weights = StringTable()
    columns = entries_from_json([added(entries(), row=7)], weights)
    assert {name: column.tolist() for name, column in columns.items() if name != "uuid"} == {
        "trajectory_id": [5, 6],
        "num_samples": [2, 4],
        "steps": [2, 2],
        "batch": [1, 2],
        "extra": [1, 1],
        "document": [0, 0],
        "nbytes": [2 * 8 + 3, 4 * 8 + 6],
        "max_episode_length": [9, 8],
        "version_low": [1, -(1 << 63)],
        "version_high": [2, -(1 << 63)],
        "committed": [7, 7],
        "weights": [0, 1],
        "shard": [7, 7],
        "start_samples": [0, 2],
        "start_extra": [0, 3],
        "start_document": [0, 0],
    }
    assert [weights[0], weights[1]] == ["a", "b"]
    assert columns["uuid"].tobytes() == bytes(16) + b"\xff" * 16


def test_what_is_told_of_records_is_what_is_read() -> None:
    flats = [flatten(witness(key)) for key in (3, 1)]
    told = orjson.loads(orjson.dumps(entries_to_json(NewEntries.of(flats), [5, 6], bytes(32))))
    assert told["ids"] == [[5, 6]]
    assert told["extents"][0] == [flats[0].extent.steps, flats[0].extent.batch, *told["extents"][0][2:]]
    assert told["uuids"] == "00" * 32


def test_shards_of_one_commit_are_joined_by_id() -> None:
    low = entries(ids=[[5, 5], [8, 8]])
    high = entries(ids=[[6, 7]])
    columns = entries_from_json([added(low), added(high, row=1)], StringTable())
    assert columns["trajectory_id"].tolist() == [5, 6, 7, 8]
    assert columns["shard"].tolist() == [0, 1, 1, 0]
    assert columns["start_samples"].tolist() == [0, 0, 2, 2]


def test_ids_of_a_shard_among_several_ascend() -> None:
    down = {"trajectory_id": np.array([6, 5]), "shard": np.zeros(2)}
    assert by_id([down])["trajectory_id"].tolist() == [6, 5]  # alone, the catalog refuses it
    with pytest.raises(CorruptStoreError, match="do not ascend"):
        by_id([down, {"trajectory_id": np.array([7]), "shard": np.zeros(1)}])


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": [[5, 7]]},
        {"ids": [[5, 5]]},
        {"ids": "5-6"},
        {"extents": [[2, 1, 1, 0], [3, 2, 1, 0]]},
        {"extents": [[2, 1, 1, 0], [1 << 62, 4, 1, 0]]},
    ],
)
def test_entries_that_do_not_add_up_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptStoreError):
        entries_from_json([added(entries(**changes))], StringTable())


@pytest.mark.parametrize(
    "changes",
    [
        {"extents": [[2, 1, 1], [2, 2, 1]]},
        {"extents": [[2, 1, 1, 0.5], [2, 2, 1, 0]]},
        {"weights": [1, 2]},
        {"weights": "ab"},
        {"versions": {}},
        {"max_episode_length": [True, 1 << 70]},
    ],
)
def test_entries_of_the_wrong_kind_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((CorruptStoreError, TypeError, ValueError, OverflowError)):
        entries_from_json([added(entries(**changes))], StringTable())


# -- ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [([], []), ([3], [[3, 3]]), ([3, 4, 5], [[3, 5]]), ([0, 2, 3, 9], [[0, 0], [2, 3], [9, 9]])],
)
def test_ids_as_ranges(ids: list[int], ranges: list[list[int]]) -> None:
    assert ranges_of(ids) == ranges
    assert parse_ranges(ranges).tolist() == ranges


@pytest.mark.parametrize("value", [None, {}, [[1]], [[2, 1]], [[-1, 1]], [[0.5, 1]], [[0, 1 << 64]], ["ab"]])
def test_what_is_no_ranges_is_refused(value: Any) -> None:
    with pytest.raises(CorruptStoreError):
        parse_ranges(value)


def test_ids_in_a_message() -> None:
    assert ids_in_words([9, 3, 4, 5, 7]) == "3 to 5, 7, 9"


@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True, 1 << 63])
def test_what_is_no_natural_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="natural number"):
        natural(value)
    assert natural(0) == 0
    assert natural((1 << 63) - 1) == (1 << 63) - 1
