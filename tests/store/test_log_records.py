"""Lines of the commit log and what records say, by hand: no store, no disk."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.store.test_shard_table import STEP, manifest
from trajstore.errors import CorruptStoreError, UnsafeContentError
from trajstore.store.additions import AddedShard, entries_from_json
from trajstore.store.log_records import (
    decode_lines,
    encode_line,
    manifest_from_json,
    manifest_to_json,
    natural,
    parse_ranges,
    ranges_of,
    segment_generation,
    segment_name,
)
from trajstore.store.packing import StringTable


def line(body: bytes) -> bytes:
    return b"%08x " % zlib.crc32(body) + body + b"\n"


MANIFEST = manifest(3)
ENTRIES = {
    "ids": [[5, 6]],
    "extents": [[2, 1, 1, 0], [2, 2, 1, 0]],
    "max_episode_length": [9, 8],
    "versions": [[1, 2], None],
    "weights": ["a", "b"],
    "uuids": "00" * 16 + "ff" * 16,
}
"""Two trajectories: T = 2, B = 1, E = 1 and T = 2, B = 2, E = 1 (samples 2 + 4; with extra rows 3 + 6)."""


# -- lines --------------------------------------------------------------------------------------------


def test_a_line_is_checksum_space_json_line_feed() -> None:
    assert encode_line({"generation": 7, "ids": np.arange(2)}) == line(b'{"generation":7,"ids":[0,1]}')


@pytest.mark.parametrize(
    "torn", [b"", b"5", line(b'{"b":2}')[:-1], b"00000000 {}\n", b"xxxxxxxx {}\n", line(b"[1]"), line(b"{"), b"\n"]
)
def test_a_torn_end_is_left_out(torn: bytes) -> None:
    whole = line(b'{"a":1}')
    tail = decode_lines(whole + torn, "log/1", offset=100)
    assert tail.records == [{"a": 1}]
    assert (tail.end, tail.torn) == (100 + len(whole), len(torn))


def test_a_bad_line_before_a_good_one_is_damage_and_named() -> None:
    with pytest.raises(CorruptStoreError, match="log/1: the record at byte 117 is damaged"):
        decode_lines(line(b'{"a":1}') + b"00000000 {}\n" + line(b'{"b":2}'), "log/1", offset=100)


def test_segments_are_named_by_their_first_generation() -> None:
    assert segment_name(12) == "log/0000000000000012.log"
    assert segment_generation(segment_name(12)) == 12


@pytest.mark.parametrize("name", ["0000000000000012.log", "log/12.log", "log/000000000000001x.log", "log/x/1.log", ""])
def test_other_names_are_no_segments(name: str) -> None:
    assert segment_generation(name) is None


# -- manifests ----------------------------------------------------------------------------------------


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
        {"places": [[0, 964], None]},
        {"column_crc32": [1, "2"]},
        {"name": 3},
        {"files": [["shards/x.pt", 10]]},
        {"files": None},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptStoreError):
        manifest_from_json(manifest_to_json(MANIFEST, 0) | changes, [STEP])


def test_a_file_outside_the_directory_is_refused() -> None:
    with pytest.raises(UnsafeContentError):
        manifest_from_json(manifest_to_json(MANIFEST, 0) | {"files": [["../x", 1000, 0]]}, [STEP])


# -- what was added -----------------------------------------------------------------------------------


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
        entries_from_json([AddedShard(4, 3, 0, replace(MANIFEST, rows=(6, 9)), ENTRIES | changes, 7)], StringTable())


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


@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True, 1 << 63])
def test_what_is_no_natural_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="natural number"):
        natural(value)
    assert natural(0) == 0
    assert natural((1 << 63) - 1) == (1 << 63) - 1
