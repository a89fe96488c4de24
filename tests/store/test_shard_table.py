"""The shard table and log records: manifests, rows and refusals."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import ColumnSpec, Schema
from trajstore._core.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore._core.store.additions import AddedShard, entries_from_json
from trajstore._core.store.json_arrays import StringTable, array_to_json
from trajstore._core.store.log_records import manifest_from_json, manifest_to_json, parse_ranges
from trajstore._core.store.shard_table import ShardTable, shard_name, shard_number
from trajstore.errors import CorruptStoreError, UnsafeContentError

STEP = Schema("step", (ColumnSpec("actions", "float32", (2,)), ColumnSpec("dones", "bool", (), Axis.FIRST_EXTRA)))
AGENT = Schema("agent", (ColumnSpec("input_ids", "int64", ()),))


def manifest(number: int, schema: Schema = STEP, rows: int = 6, *, mapped: bool = True) -> ShardManifest:
    name = shard_name(number)
    columns = len(schema.columns)
    return ShardManifest(
        name=name,
        format="pt" if mapped else "zarr",
        schema=schema,
        files=(StoredFile(f"shards/{name}.pt", 1000 + number, 7 * number),),
        places=tuple(ColumnPlace(0, 64 * (at + 1)) if mapped else None for at in range(columns)),
        column_crc32=tuple(at if mapped else None for at in range(columns)),
        rows=(counts := (rows, *(rows + 2 for _ in range(columns - 1)))),
        nbytes=schema.plain_nbytes(counts),
    )


def table_of(*manifests: ShardManifest) -> ShardTable:
    table = ShardTable()
    for shard_manifest in manifests:
        number = shard_number(shard_manifest.files[0].name)
        assert number is not None
        table.add(number, shard_manifest)
    return table


SHARDS = (manifest(3), manifest(4, AGENT, 9), manifest(8, mapped=False), manifest(20, rows=1))


@pytest.mark.parametrize(
    ("of", "name", "forged"),
    [
        ("table", "schemas", []),
        ("table", "families", []),
        ("table", "numbers", array_to_json(np.array([3, 4, 8]))),
        ("table", "numbers", array_to_json(np.array([-3, 4, 8, 20]))),
        ("table", "family", array_to_json(np.array([0, 1, 2, 9], np.int32))),
        ("table", "family", array_to_json(np.array([0, 1, 2, -1], np.int32))),
        ("table", "row", array_to_json(np.array([0, 0, 0, 5], np.int32))),
        ("table", "row", array_to_json(np.array([0, 0, 0, -1], np.int32))),
        ("table", "row", None),
        ("family", "schema", 7),
        ("family", "column_files", [0]),
        ("family", "column_files", [0, 1]),
        ("family", "column_files", [-1, 0]),
        ("family", "sizes", array_to_json(np.array([[1000]]))),
        ("family", "offsets", array_to_json(np.array([[64, -1], [64, 128]]))),
        ("family", "offsets", array_to_json(np.array([[64, 2000], [64, 128]]))),
        ("family", "rows", array_to_json(np.array([[200, 8], [1, 3]]))),
        ("family", "rows", array_to_json(np.array([[1 << 62, 8], [1, 3]]))),
        ("family", "rows", array_to_json(np.array([[-2, 8], [1, 3]]))),
        ("family", "rows", array_to_json(np.zeros((50, 2), np.int64))),
    ],
)
def test_what_does_not_fit_is_refused(of: str, name: str, forged: Any) -> None:
    value = orjson.loads(orjson.dumps(table_of(*SHARDS).to_json()))
    (value["families"][0] if of == "family" else value)[name] = forged
    with pytest.raises(CorruptStoreError):
        ShardTable.from_json(value)


# -- Lines and records of the commit log, by hand: no store, no disk --


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


# -- lines -------------------------------------------------------------------------------------------


# -- manifests ---------------------------------------------------------------------------------------


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


# -- additions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": [[5, 7]]},
        {"ids": [[5, 5]]},
        {"ids": "5-6"},
        {"extents": [[2, 1, 1, 0], [3, 2, 1, 0]]},
        {"extents": [[2, 1, 1, 0], [1 << 62, 4, 1, 0]]},
        {"valid": [2]},
        {"valid": "ab"},
    ],
)
def test_entries_that_do_not_add_up_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptStoreError):
        entries_from_json([AddedShard(4, 3, 0, replace(MANIFEST, rows=(6, 9)), ENTRIES | changes, 7)], StringTable())


# -- ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, {}, [[1]], [[2, 1]], [[-1, 1]], [[0.5, 1]], [[0, 1 << 64]], ["ab"]])
def test_what_is_no_ranges_is_refused(value: Any) -> None:
    with pytest.raises(CorruptStoreError):
        parse_ranges(value)
