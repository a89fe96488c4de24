"""Zarr shards: the conformance suite in several configurations, and Zarr's own features."""

from __future__ import annotations

import json
import multiprocessing
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores import stored
from tests.support.equality import same
from tests.support.formats import SHARD, SHARDS, FormatConformance, StoredShard, store_shard
from tools.crash.forked import forking
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import FlatTrajectory, raw_bytes
from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import Buffer, EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats.base import ShardContent, TrajectoryFormat
from trajstore._core.formats.zarr import ZarrFormat, _write_array, node_name
from trajstore.errors import ConfigurationError, CorruptStoreError, MissingDependencyError
from trajstore.trajectory import Trajectory

zarr = pytest.importorskip("zarr", reason="needs the extra 'zarr'")

FORMATS = {
    "raw": ZarrFormat(),
    "zstd": ZarrFormat(codec="zstd", level=1),
    "blosc, small chunks": ZarrFormat(codec="blosc", level=9, chunk_bytes=64),
}
ROOT = f"shards/{SHARD}.zarr"


class TestConformance(FormatConformance):
    @pytest.fixture(params=["raw", "blosc, small chunks", pytest.param("zstd", marks=pytest.mark.campaign)])
    def format(self, request: pytest.FixtureRequest) -> TrajectoryFormat:
        return FORMATS[request.param]


def step(rewards: torch.Tensor) -> FlatTrajectory:
    return flatten(Trajectory(rewards=rewards))


@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize("case", sorted(SHARDS))
def test_any_zarr_reader_finds_everything_on_disk(tmp_path: Path, config: str, case: str) -> None:
    flats = SHARDS[case]()
    shard = store_shard(FORMATS[config], flats)
    LocalDirectory(tmp_path).publish([EncodedFile(name, [data]) for name, data in shard.files.items()])
    group = zarr.open_group(tmp_path / ROOT, mode="r", zarr_format=3)
    assert Schema.from_json(group.attrs["schema"]) == shard.manifest.schema
    assert group.attrs["trajectories"] == [number for flat in flats for number in flat.extent]
    arrays = {array.attrs["name"]: array for _, array in group.arrays()}
    assert len(arrays) == len(shard.manifest.schema.columns)
    for column, (spec, rows) in enumerate(shard.manifest.stored):
        array = arrays[spec.name]
        assert array.shape == (rows, *spec.row_shape)
        assert array.attrs.get("torch_dtype", array.dtype.name) == spec.dtype
        assert Axis[array.attrs["axis"].upper()] is spec.axis
        assert array[:].tobytes() == raw_bytes(shard.column(column)), spec.name


@pytest.mark.parametrize("case", sorted(SHARDS))
def test_raw_columns_are_written_as_zarr_writes_them(case: str) -> None:
    shard = store_shard(ZarrFormat(), SHARDS[case]())
    compared = 0
    for column, (spec, rows) in enumerate(shard.manifest.stored):
        if rows * spec.row_nbytes:
            data = raw_bytes(shard.column(column))
            for key, value in _write_array(ZarrFormat(), spec, rows, [data], None, spec.torch_dtype).items():
                ours = shard.files[f"{ROOT}/{node_name(spec.name)}/{key}"]
                if key == "zarr.json":
                    assert json.loads(ours) == json.loads(value)
                else:
                    assert ours == value
                compared += 1
    assert compared >= 2 * (len(shard.manifest.rows) - 3)


def test_raw_columns_are_mapped_and_others_are_not() -> None:
    flats = SHARDS["step"]()
    assert None not in store_shard(ZarrFormat(), flats).manifest.places
    for config in (ZarrFormat(chunk_bytes=20), FORMATS["zstd"], FORMATS["blosc, small chunks"]):
        manifest = store_shard(config, flats).manifest
        widths = zip(manifest.places, manifest.rows, manifest.schema.row_nbytes, strict=True)
        large = [place for place, rows, width in widths if rows * width > 64]
        assert large == [None] * len(large)


@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_are_written_and_keep_their_sign(config: str, value: float) -> None:
    shard = store_shard(FORMATS[config], [step(torch.full((40, 2, 3), value))])
    reader = FORMATS[config].open(shard.fetch, shard.manifest)
    assert same(reader.rows(0, 0, 80), torch.full((80, 3), value))
    assert any("/c." in name for name in shard.files)


@given(
    steps=st.integers(1, 40),
    width=st.integers(1, 9),
    chunk_bytes=st.integers(1, 300),
    codec=st.sampled_from(["none", "zstd", "blosc", "blosc_zstd"]),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=40, deadline=None)
def test_any_range_of_any_chunking(
    steps: int, width: int, chunk_bytes: int, codec: Any, bounds: tuple[float, float]
) -> None:
    values = torch.arange(steps * width, dtype=torch.int32).reshape(steps, 1, width)
    config = ZarrFormat(codec=codec, chunk_bytes=chunk_bytes)
    shard = store_shard(config, [step(values), step(values + 1)])
    start, stop = sorted(round(bound * 2 * steps) for bound in bounds)
    expected = torch.cat([values, values + 1])[:, 0]
    reader = config.open(shard.fetch, shard.manifest)
    assert same(reader.rows(0, start, stop), expected[start:stop])
    assert same(reader.rows(0, 0, 2 * steps), expected)
    assert same(reader.rows(0, start, stop), expected[start:stop])


@given(
    values=st.lists(st.floats(-50, 0, width=16), min_size=1, max_size=60),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    chunk_bytes=st.integers(1, 300),
    codec=st.sampled_from(["zstd", "blosc", "blosc_zstd"]),
)
@settings(max_examples=40, deadline=None)
def test_compressed_floats_of_rollouts(
    values: list[float], dtype: torch.dtype, chunk_bytes: int, codec: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rollout = AgentTrajectory(
        input_ids=torch.arange(len(values)), response_start=0, rollout_log_probs=torch.tensor(values, dtype=dtype)
    )
    options = {"codec": codec, "chunk_bytes": chunk_bytes}
    path = tmp_path_factory.mktemp("store")
    stored(path, [rollout, rollout], trajectory_format="zarr", format_options=options)
    with TrajectoryReplayBuffer.open(path) as reader:
        assert same(reader.get(1).rollout_log_probs, rollout.rollout_log_probs)


def test_only_the_needed_chunks_are_fetched() -> None:
    config = ZarrFormat(codec="zstd", chunk_bytes=400)
    shard = store_shard(config, [step(torch.randn(100, 1, 10, generator=torch.Generator().manual_seed(0)))])
    fetched: list[str] = []

    def fetch(name: str) -> Buffer:
        fetched.append(name)
        return shard.fetch(name)

    reader = config.open(fetch, shard.manifest)
    reader.rows(0, 35, 38)
    reader.rows(0, 31, 40)
    assert [name for name in fetched if "/c." in name] == [f"{ROOT}/rewards/c.3.0"]


# -- damage -------------------------------------------------------------------------------------------


def with_file(shard: StoredShard, name: str, content: bytes) -> StoredShard:
    """Return the shard with a replaced file and a matching manifest."""
    files = tuple(
        replace(file, size=len(content), crc32=zlib.crc32(content)) if file.name == name else file
        for file in shard.manifest.files
    )
    return replace(shard, manifest=replace(shard.manifest, files=files), files={**shard.files, name: content})


def edited(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return apply


ARRAY_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda _: b"{",
    "no object": lambda _: b"[]",
    "empty": lambda _: b"",
    "huge array": edited(lambda v: v.update(shape=[1 << 50, 10])),
    "huge chunk": edited(lambda v: v["chunk_grid"]["configuration"].update(chunk_shape=[1 << 50, 10])),
    "wide chunk": edited(lambda v: v["chunk_grid"]["configuration"].update(chunk_shape=[10, 1 << 50])),
    "no chunk": edited(lambda v: v["chunk_grid"]["configuration"].update(chunk_shape=[0, 10])),
    "other dtype": edited(lambda v: v.update(data_type="float64")),
    "unknown dtype": edited(lambda v: v.update(data_type="decimal")),
    "unknown codec": edited(lambda v: v["codecs"].append({"name": "exec", "configuration": {}})),
    "no codecs": edited(lambda v: v.pop("codecs")),
    "a group": edited(lambda v: v.update(node_type="group")),
    "another version": edited(lambda v: v.update(zarr_format=2)),
    "rotated words of no size": edited(lambda v: v["attributes"].update(rotated=3)),
}


@pytest.mark.parametrize("damage", ARRAY_DAMAGE)
def test_hostile_array_metadata_is_refused(damage: str) -> None:
    config = ZarrFormat(codec="zstd", chunk_bytes=400)
    shard = store_shard(config, [step(torch.zeros(20, 1, 10))])
    name = f"{ROOT}/rewards/zarr.json"
    hostile = with_file(shard, name, ARRAY_DAMAGE[damage](shard.files[name]))
    with pytest.raises(CorruptStoreError, match="rewards"):
        config.open(hostile.fetch, hostile.manifest).rows(0, 0, 20)


GROUP_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda _: b"\xff",
    "no attributes": edited(lambda v: v.pop("attributes")),
    "another layout": edited(lambda v: v["attributes"].update(layout="else")),
    "a later version": edited(lambda v: v["attributes"].update(version=99)),
    "another schema": edited(lambda v: v["attributes"]["schema"]["columns"].pop()),
    "no schema": edited(lambda v: v["attributes"].update(schema=3)),
    "an array": edited(lambda v: v.update(node_type="array")),
}


@pytest.mark.parametrize("damage", GROUP_DAMAGE)
def test_foreign_groups_are_refused(damage: str) -> None:
    shard = store_shard(ZarrFormat(), [step(torch.zeros(2, 1, 1))])
    hostile = with_file(shard, f"{ROOT}/zarr.json", GROUP_DAMAGE[damage](shard.files[f"{ROOT}/zarr.json"]))
    with pytest.raises(CorruptStoreError):
        ZarrFormat().open(hostile.fetch, hostile.manifest)


@pytest.mark.parametrize("config", FORMATS)
def test_a_chunk_that_nobody_names_is_not_taken_for_zeros_and_a_short_one_is_refused(config: str) -> None:
    shard = store_shard(FORMATS[config], [step(torch.ones(40, 1, 3))])
    chunk = max(name for name in shard.files if "/c." in name)
    keep = tuple(file for file in shard.manifest.files if file.name != chunk)
    manifest = replace(shard.manifest, files=keep, places=(None,), column_crc32=(None,))
    with pytest.raises(CorruptStoreError, match=chunk):
        FORMATS[config].open(shard.fetch, manifest).rows(0, 0, 40)
    hostile = with_file(shard, chunk, shard.files[chunk][:-4])
    manifest = replace(hostile.manifest, places=(None,), column_crc32=(None,))
    with pytest.raises(CorruptStoreError, match="rewards"):
        FORMATS[config].open(hostile.fetch, manifest).rows(0, 0, 40)


# -- names and options --------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), unique=True))
@settings(max_examples=30, deadline=None)
def test_node_names_are_legal_and_distinct(columns: list[str]) -> None:
    nodes = [node_name(column) for column in columns]
    assert len(set(nodes)) == len(nodes)
    for column, node in zip(columns, nodes, strict=True):
        assert node.isascii()
        assert "/" not in node
        assert not node.startswith("__")
        assert node.strip(".")
        assert node != "zarr.json"
        assert "~" in node or node == "%" or unquote(node) == column


def test_common_names_stay_as_they_are() -> None:
    for column in ("actions", "curr_obs.main_images", "_document", "forward_inputs.a-b_2"):
        assert node_name(column) == column
    assert node_name("a/b") == "a%2Fb"
    assert len(node_name("x" * 1000)) <= 150


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "gzip"},
        {"codec": "zstd", "level": 23},
        {"codec": "zstd", "level": 0},
        {"codec": "blosc", "level": 10},
        {"chunk_bytes": 0},
        {"codec": ["zstd"]},
        {"level": None},
        {"chunk_bytes": "1M"},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        ZarrFormat(**options)


def test_without_zarr_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = store_shard(ZarrFormat(), [step(torch.zeros(2, 1, 1))])
    monkeypatch.setitem(sys.modules, "zarr", None)
    for call in (
        lambda: ZarrFormat().encode(SHARD, ShardContent.of(shard.flats)),
        lambda: ZarrFormat().open(shard.fetch, shard.manifest),
    ):
        with pytest.raises(MissingDependencyError, match=r"trajstore\[zarr\]"):
            call()


# -- processes ----------------------------------------------------------------------------------------


def _read_in_child(shard: StoredShard, config: ZarrFormat) -> bool:
    return same(config.open(shard.fetch, shard.manifest).rows(0, 0, 40), torch.ones(40, 3))


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), forking()], ids=["forked", "new"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_reads_and_the_parent_goes_on(context: Any) -> None:
    config = ZarrFormat(codec="zstd", chunk_bytes=100)
    shard = store_shard(config, [step(torch.ones(40, 1, 3))])  # starts zarr's thread in the parent
    assert _read_in_child(shard, config)
    with context.Pool(1) as pool:
        assert pool.apply_async(_read_in_child, (shard, config)).get(timeout=600)
    assert _read_in_child(shard, config)
