"""``docs/format.md`` suffices to read a store, and trajstore writes its worked example."""

from __future__ import annotations

import itertools
import json
import time
import uuid
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import format_reader
from tests.pages import blocks
from tests.sessions.test_processes import begin, in_child
from tests.stores import LIVE, crashed_store, writer_to
from tests.support.copies import copy_live
from tests.support.witness import witness
from trajstore import AgentTrajectory, Reward, Sessions, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.columns.conversion import flatten
from trajstore._core.formats import FORMATS
from trajstore._core.store.json_arrays import array_to_json


def agree(store: format_reader.Store, entry: format_reader.Entry, trajectory: Trajectory | AgentTrajectory) -> None:
    """Compare the page reader's columns with the added trajectory."""
    flat = flatten(trajectory)
    columns = format_reader.read_columns(store, entry)
    assert list(columns) == [column.name for column in flat.schema.columns]
    for number, column in enumerate(flat.schema.columns):
        assert columns[column.name].data == bytes(flat.column_bytes(number)), column.name
        once = 5 if column.name == "next_obs.image" else column.axis
        assert (columns[column.name].dtype, columns[column.name].axis) == (column.dtype, once)
    assert entry.versions == flat.versions
    assert entry.max_episode_length == flat.max_episode_length
    assert entry.weights == flat.model_weights_id
    assert entry.facts == flat.facts
    assert entry.samples == flat.num_samples
    format_reader.check_shard(store.path, entry.shard)


def agree_with_label(store: format_reader.Store, entry: format_reader.Entry) -> None:
    """Compare an entry with the label of its shard."""
    label = format_reader.read_label(store.path, entry.shard)
    assert (label["schema"], label["rows"]) == (entry.shard.schema, entry.shard.rows)
    assert (
        entry.shard.column_crc32 in (label["column_crc32"], [None] * len(label["rows"])) or entry.shard.format == "zarr"
    )
    said = label["entries"]
    at = format_reader.ids_of(said["ids"]).index(entry.number)
    extents, times = label["extents"], list(itertools.accumulate(said["times"]))
    assert tuple(extents[at]) == entry.extent
    assert said["uuids"][32 * at :][:32] == entry.uuid.replace("-", "")
    assert (said["versions"][at] and tuple(said["versions"][at])) == entry.versions
    assert (said["max_episode_length"][at], said["weights"][at]) == (entry.max_episode_length, entry.weights)
    assert 0 <= entry.committed - times[at] < 600_000_000
    assert ("valid" in said) <= (entry.samples == said.get("valid", {at: 0})[at])


def test_the_page_is_enough_to_read_what_a_crash_leaves(tmp_path: Path) -> None:
    """Two snapshots' shards, a pin, a rewrite, and a commit of two shards in the log."""
    store = format_reader.open_store(crashed_store(tmp_path / "store"))
    assert list(store.live) == list(LIVE)
    for number, key in LIVE.items():
        agree(store, store.live[number], witness(key))
    assert format_reader.ids_of(store.pins["start"]["ids"]) == [0, 1]
    agree(store, store.pinned[0], witness(1))
    times = [entry.committed for entry in (store.pinned[0], *store.live.values())]
    assert times == sorted(times)
    assert times[0] > 0


AGENT = AgentTrajectory(
    task_id="sort",
    messages=[{"role": "user", "content": "Sort 3 1 2.\n"}],
    input_ids=torch.arange(12),
    response_start=8,
    response_mask=torch.ones(4, dtype=torch.bool),
    old_log_probs=torch.full((4,), -0.5),
    reward=Reward(outcome=1.0),
    policy_version=9,
)
LEAVES = Trajectory(
    rewards=torch.ones(3, 2, 1),
    valid=torch.tensor([[True, False], [True, True], [False, True]]),
    curr_obs={"a.b": {"c": torch.zeros(3, 2, 2)}, "task": "stack", "scale": torch.ones(4)},
)
_IMAGES = torch.arange(5 * 2 * 70, dtype=torch.int16).reshape(5, 2, 70)
REPEATED = Trajectory(
    rewards=torch.ones(4, 2, 1),
    curr_obs={"image": _IMAGES[:-1]},
    next_obs={"image": _IMAGES[1:], "n": _IMAGES[1:, :, 0]},
)


_OF_FORMATS = [
    *((name, {}) for name in FORMATS),
    ("zarr", {"codec": "zstd"}),
    ("zarr", {"codec": "blosc_zstd", "chunk_bytes": 60}),
]


@pytest.mark.parametrize(("form", "options"), _OF_FORMATS, ids=str)
def test_the_page_is_enough_to_read_every_format(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    if form == "zarr":
        pytest.importorskip("zarr")
    live, copy = tmp_path / "live", tmp_path / "copy"
    added = [witness(5), witness(3), AGENT, LEAVES, witness(11), REPEATED]
    with writer_to(live, trajectory_format=form, format_options=options, store_frames_once=True) as buffer:
        buffer.add_trajectories(added)
        buffer.points.pin("all")
        buffer.evict([0])
        buffer.compact()
        copy_live(live, copy, "readers", "writer.lock")
        buffer.save_checkpoint(tmp_path / "checkpoint")
    for path in (copy, live, tmp_path / "checkpoint"):
        store = format_reader.open_store(path)
        assert list(store.live) == [1, 2, 3, 4, 5]
        for number, entry in store.live.items():
            agree(store, entry, added[number])
            agree_with_label(store, entry)
        assert (path / "index_copy.json").read_bytes() == (path / "trajectory_index.json").read_bytes()
    store = format_reader.open_store(copy)
    agree(store, store.pinned[0], added[0])
    document = format_reader.read_document(format_reader.read_columns(store, store.live[2]))
    assert document["messages"] == AGENT.messages
    assert document["reward"]["outcome"] == 1.0
    document = format_reader.read_document(format_reader.read_columns(store, store.live[3]))
    assert document["leaves"] == {"curr_obs.task": "stack"}
    assert document["tensors"]["curr_obs.scale"][:2] == ["float32", [4]]


# -- the worked example -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> str:
    page = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
    return page.split("\n## A worked example\n")[1].split("\n## ")[0]


def hex_dump(text: str) -> dict[int, bytes]:
    lines = (line.split(":") for line in text.splitlines())
    return {int(offset, 16): bytes.fromhex(digits) for offset, digits in lines}


def test_the_worked_log_rows_and_array_decode_as_the_page_says(example: str) -> None:
    log, line, rows = blocks(example, "text")
    added, evicted = (format_reader.decode_line(each.encode()) for each in log.splitlines())
    assert added is not None
    assert evicted == {"generation": 2, "operation": "evict", "ids": [[0, 0]]}
    assert b"".join(hex_dump(line).values()) == log.encode().splitlines(keepends=True)[1]
    data = bytearray(2403)
    for offset, piece in hex_dump(rows).items():
        data[offset : offset + len(piece)] = piece
    (shard,) = added["shards"]
    crcs = shard["shard"]["column_crc32"]
    assert [zlib.crc32(data[0x5C0:0x5D0]), zlib.crc32(data[0x640:0x646]), zlib.crc32(data[0x6C0:0x6E0])] == crcs
    assert [place[1] for place in shard["shard"]["places"]] == [0x5C0, 0x640, 0x6C0]
    assert torch.frombuffer(data[0x5C8:0x5D0], dtype=torch.float32).tolist() == [2.0, 2.5]
    assert list(data[0x643:0x646]) == [0, 0, 1]
    assert format_reader.unpack(json.loads(blocks(example, "json")[0])).tolist() == [4, 5, 6, 9]


@pytest.mark.parametrize("rows", [0, 1, 65_536, 65_537, 200_000])
def test_the_page_is_enough_to_read_long_arrays(rows: int) -> None:
    random = np.random.default_rng(rows)
    steps = random.integers(-(1 << 40), 1 << 40, (rows, 2)) >> np.arange(rows)[:, None] // 65_536 * 16
    for array in (np.cumsum(steps, axis=0), steps[:, 0].astype(np.int32), random.bytes(16 * rows)):
        stored = np.frombuffer(array, "V16") if isinstance(array, bytes) else array
        assert np.array_equal(format_reader.unpack(array_to_json(stored)), stored)


def test_trajstore_writes_the_worked_example(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(blocks(example, "python")[0], names)  # the page's own program
    close = TrajectoryReplayBuffer.close

    def copy_and_close(buffer: TrajectoryReplayBuffer, wait: bool = True) -> None:
        if not (tmp_path / "copy").exists():
            copy_live(tmp_path / "store", tmp_path / "copy")
        close(buffer, wait)

    monkeypatch.setattr(TrajectoryReplayBuffer, "close", copy_and_close)
    names["write"](str(tmp_path / "store"))
    log, _, rows = blocks(example, "text")
    written = (tmp_path / "copy" / "log" / "0000000000000001.log").read_bytes().splitlines()
    first, example_record = (json.loads(line[9:]) for line in (written[0], log.encode().splitlines()[0]))
    for record in (first, example_record):  # UUIDs and times are in the shard's label, too
        del record["shards"][0]["entries"]["uuids"], record["shards"][0]["shard"]["files"][0][2]
    assert abs(first.pop("time") - time.time_ns() // 1000) < 600_000_000
    del example_record["time"]
    assert first == example_record
    assert written[1] == log.encode().splitlines()[1]
    shard = (tmp_path / "copy" / "shards" / "shard_00000000.pt").read_bytes()
    for offset, piece in hex_dump(rows).items():
        assert shard[offset : offset + len(piece)] == piece


# -- stores that a reader must refuse -----------------------------------------------------------------


@pytest.mark.parametrize("trajectory_format", list(FORMATS))
def test_the_page_is_enough_to_read_values_by_row(trajectory_format: Any, tmp_path: Path) -> None:
    rows = [torch.randn(4, 2, 3), torch.randn(2, 2, 3), torch.randn(4, 2, 3)]
    blocks_of_steps = [Trajectory(rewards=torch.zeros(len(each), 2, 1)) for each in rows]
    path = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=trajectory_format) as buffer:
        buffer.add_trajectories(blocks_of_steps)
        annotate(buffer, [0, 2], {"label": rows[0::2]})
        annotate(buffer, [2, 1], {"label": [rows[0], rows[1]], "score": 1})
        copy = copy_live(path, tmp_path / "copy")
    for each in (copy, path):
        store = format_reader.open_store(each)
        for number, expected in ((0, rows[0]), (1, rows[1]), (2, rows[0])):
            values = format_reader.read_rows(store, store.live[number], "label")
            assert (values.dtype, values.shape) == ("float32", (len(expected) * 2, 3))
            assert values.data == expected.numpy().tobytes()
            format_reader.check_shard(each, store.notes[number]["label"].shard)


def test_the_page_is_enough_to_read_values_that_came_late(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        annotate(buffer, [0, 1], {"score": [0.5, 2], "tag": ["é", "x"]}, who="anna")
        buffer.points.save(1)
        annotate(buffer, [0], {"score": 9})
        buffer.points.rollback(1)
        annotate(buffer, 1, {"tag": None})
        expected = {0: {"score": 0.5, "tag": "é"}, 1: {"score": 2.0, "tag": None}}
        assert format_reader.open_store(copy_live(tmp_path / "store", tmp_path / "copy")).notes == expected
    assert format_reader.open_store(tmp_path / "store").notes == expected


def test_the_reader_reads_sessions(tmp_path: Path) -> None:
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path).close()
    for name in "abc":
        in_child(partial(begin, tmp_path, name, state="finished" if name == "b" else "open"), killed=True)
    with Sessions(tmp_path) as sessions:
        session = sessions.session("task", "c")  # from another journal
        session.add_call([1, 2, 300, 70_000, 1 << 30], [3, 4], [-0.5, -0.25], call_id="far")
        session.incomplete("gap", "timeout")
        assert [call.id for call in session.calls()] == ["first", "second", "far", "gap"]
        found = {one["fields"]["rollout_id"]: one for one in format_reader.read_sessions(tmp_path).values()}
        assert {name: one["state"] for name, one in found.items()} == {"a": "open", "b": "finished", "c": "open"}
        for info in sessions.listed():
            mine = found[info.rollout_id]["calls"]
            for call, one in zip(mine, sessions.read("task", info.rollout_id), strict=True):
                assert (call["c"], call.get("v"), call.get("gap")) == (one.id, one.policy_version, one.gap)
                if one.gap is None:
                    assert (call["tokens"], call["start"]) == (one.tokens.tolist(), one.start)
                    assert one.log_probs is not None
                    assert call["log_probs"] == one.log_probs.tolist()
    b = found["b"]["open"]
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path).close()
    assert b not in format_reader.read_sessions(tmp_path)
    (entry,) = format_reader.open_store(tmp_path).live.values()
    assert entry.uuid == uuid.uuid5(uuid.UUID(b), "0").hex
