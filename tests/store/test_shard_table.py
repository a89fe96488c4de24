"""The shard table: manifests in and out, rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from trajstore.columns.fields import Axis
from trajstore.columns.schema import ColumnSpec, Schema
from trajstore.errors import CorruptStoreError
from trajstore.formats.base import ColumnPlace, ShardManifest, StoredFile
from trajstore.store.packing import pack
from trajstore.store.shard_table import ShardTable, shard_name, shard_number

STEP = Schema(
    "step",
    (ColumnSpec("actions", "float32", (2,)), ColumnSpec("dones", "bool", (), Axis.FIRST_EXTRA)),
)
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
        rows=(rows, *(rows + 2 for _ in range(columns - 1))),
    )


def table_of(*manifests: ShardManifest) -> ShardTable:
    table = ShardTable()
    for one in manifests:
        number = shard_number(one.files[0].name)
        assert number is not None
        table.add(number, one)
    return table


SHARDS = (manifest(3), manifest(4, AGENT, 9), manifest(8, mapped=False), manifest(20, rows=1))


def test_names_and_numbers() -> None:
    assert shard_name(42) == "shard_00000042"
    assert shard_number("shards/shard_00000042.pt") == 42
    assert shard_number("shards/shard_123456789.zarr/c/0") == 123456789
    for name in ("shard_00000042.pt", "shards/shard_42.pt", "shards/shard_00000042", "shards/other.pt"):
        assert shard_number(name) is None


def test_manifests_come_back_by_row_schemas_are_numbered_once_and_sums_are_by_row() -> None:
    made, none = table_of(*SHARDS), np.iinfo(np.int64).max
    for table in (made, ShardTable.from_json(orjson.loads(orjson.dumps(made.to_json())))):
        assert len(table) == 4
        assert dict(table.manifests()) == dict(enumerate(SHARDS))
        assert [table.number(row) for row in range(4)] == [3, 4, 8, 20]
        assert [table.schema(row) for row in range(4)] == [STEP, AGENT, STEP, STEP]
        assert table.schemas == [STEP, AGENT]
        assert table.schema_numbers().tolist() == [0, 1, 0, 0]
        assert table.of_steps().tolist() == [True, False, True, True]
        assert (table.schema_number(AGENT), table.number_of_schema(AGENT)) == (1, 1)
        assert table.nbytes().tolist() == [1003, 1004, 1008, 1020]
        assert table.row_bytes().tolist() == [6 * 8 + 8, 9 * 8, 6 * 8 + 8, 8 + 3]
        assert table.rows_on([Axis.SAMPLES]).tolist() == [6, 9, 6, 1]
        assert table.rows_on([Axis.FIRST_EXTRA, Axis.LAST_EXTRA]).tolist() == [8, none, 8, 3]
    assert ShardTable().schema_number(AGENT) is None


def of_family(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        table["families"][0][name] = value

    return change


def of_table(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        table[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        of_table("schemas", []),
        of_table("families", []),
        of_table("numbers", pack(np.array([3, 4, 8]))),
        of_table("numbers", pack(np.array([-3, 4, 8, 20]))),
        of_table("family", pack(np.array([0, 1, 2, 9], np.int32))),
        of_table("family", pack(np.array([0, 1, 2, -1], np.int32))),
        of_table("row", pack(np.array([0, 0, 0, 5], np.int32))),
        of_table("row", pack(np.array([0, 0, 0, -1], np.int32))),
        of_table("row", None),
        of_family("schema", 7),
        of_family("column_files", [0]),
        of_family("column_files", [0, 1]),
        of_family("column_files", [-1, 0]),
        of_family("sizes", pack(np.array([[1000]]))),
        of_family("offsets", pack(np.array([[64, -1], [64, 128]]))),
        of_family("offsets", pack(np.array([[64, 2000], [64, 128]]))),
        of_family("rows", pack(np.array([[200, 8], [1, 3]]))),
        of_family("rows", pack(np.array([[1 << 62, 8], [1, 3]]))),
        of_family("rows", pack(np.array([[-2, 8], [1, 3]]))),
        of_family("rows", pack(np.zeros((50, 2), np.int64))),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    value = orjson.loads(orjson.dumps(table_of(*SHARDS).to_json()))
    change(value)
    with pytest.raises(CorruptStoreError):
        ShardTable.from_json(value)
