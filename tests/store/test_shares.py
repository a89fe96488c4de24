"""A share of a store is unpacked without the other entries; it is equal to that part of the whole, and so is damage."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import orjson
import pytest

from tests.forging import forged_index
from tests.stores import stored, writer_to
from tests.support.witness import witness
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.store import json_arrays
from trajstore._core.store.catalog import ReadersCatalog
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.json_arrays import array_from_json, array_to_json, parsed_arrays
from trajstore.errors import CorruptStoreError, StoreError
from trajstore.operations.verify import verify

COUNT = 40


@pytest.fixture(scope="module", autouse=True)
def short_streams() -> Iterator[None]:
    """Let short arrays have several streams, and be parsed as long ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BLOCK_ROWS": 8, "_SHORT": 2, "_LONG_DATA": 40}.items():
            patch.setattr(json_arrays, name, value)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, short_streams: None) -> Path:
    """Return a store of rollouts and steps, some of them evicted, with an empty log."""
    path = tmp_path_factory.mktemp("written") / "store"
    with writer_to(path) as writer:
        for first in range(0, COUNT, 5):
            writer.add_trajectories([witness(key) for key in range(first, first + 3)])
            writer.add_trajectories(
                [AgentTrajectory(task_id=f"task {first}", reward=Reward(outcome=float(key))) for key in range(2)]
            )
            writer.flush()
        writer.evict([0, 7, 8, 23])
    return stored(path, [witness(COUNT)])


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Path:
    """Return a copy of that store."""
    return Path(copytree(written, tmp_path / "store"))


def whole_unpacked(catalog: ReadersCatalog, first: int, end: int) -> TrajectoryIndex:
    """Return a part of a store's entries, of which all are unpacked."""
    return catalog.index.slice(first, end)


def shown(path: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Return what a share shows, or why it is refused."""
    try:
        return _shown(path, rank, ranks)
    except StoreError as error:
        return {"error": repr(error)}


def _shown(path: Path, rank: int, ranks: int) -> dict[str, Any]:
    with TrajectoryReplayBuffer.open(path, share=(rank, ranks), seed=rank) as reader:
        index = reader._live.contents.index
        ids = reader.trajectory_ids.tolist()
        return {
            "ids": ids,
            "facts": str(reader.query().rows()),
            "drawn": reader.draw(16).ids.tolist() if ids else [],
            "uuids": reader._uuids.tolist(),
            "trajectories": [str(reader.get(number)) for number in ids],
            "columns": {
                name: (rows.dtype.str, rows.tobytes()) for name, rows in index.take(slice(0, len(index))).items()
            },
            "partial": index.may_be_partial,
        }


def shown_both_ways(path: Path, rank: int, ranks: int) -> list[dict[str, Any]]:
    """Return what a share shows whose entries alone are unpacked, and if the whole index is."""
    found = [shown(path, rank, ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadersCatalog, "part", whole_unpacked)
        return [*found, shown(path, rank, ranks)]


def refuse_to_unpack(*_: object, **__: object) -> None:
    raise AssertionError("the whole index is unpacked")


@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_a_share_is_the_part_of_the_whole(store: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[int] = []
    for rank in range(ranks):
        alone, of_whole = shown_both_ways(store, rank, ranks)
        assert alone == of_whole
        ids += alone["ids"]
    with TrajectoryReplayBuffer.open(store) as reader:
        assert ids == reader.trajectory_ids.tolist()
        assert len(ids) > 4 * json_arrays.BLOCK_ROWS
    monkeypatch.setattr(ReadersCatalog, "index", property(refuse_to_unpack, lambda *_: None, lambda _: None))
    assert shown(store, ranks - 1, ranks) == alone


def test_a_share_of_several_stores(store: Path, tmp_path: Path) -> None:
    store.rename(tmp_path / "rank_0")
    for rank in (1, 2):
        stored(tmp_path / f"rank_{rank}", [witness(100 * rank + key) for key in range(10)])
    for rank in range(4):
        alone, of_whole = shown_both_ways(tmp_path, rank, 4)
        assert alone == of_whole
        assert alone["ids"]


def test_shares_of_stores_that_have_the_same_trajectories(tmp_path: Path) -> None:
    """Each is in one share, as the copy that the whole run shows; halves of UUIDs that are equal are no copies."""
    uuids = np.random.default_rng(0).integers(0, 256, (6, 16), np.uint8)
    uuids[5, :8] = uuids[0, :8]
    for rank, sent in enumerate(([0, 1, 2], [3, 1], [5, 2, 4, 0])):
        with writer_to(tmp_path / f"rank_{rank}") as writer:
            for key in sent:
                writer._sink.add_flattened(FlatTrajectories.runs([flatten(witness(key))]), uuids[key].tobytes())
                writer.flush()
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        whole = dict(zip(reader._uuids.tolist(), reader.trajectory_ids.tolist(), strict=True))
    assert sorted(whole) == sorted(uuids.view("V16").ravel().tolist())
    for ranks in (1, 2, 3, 4, 12):
        shares = [shown(tmp_path, rank, ranks) for rank in range(ranks)]
        assert [number for share in shares for number in share["ids"]] == sorted(whole.values())
        assert [uuid for share in shares for uuid in share["uuids"]] == sorted(whole, key=whole.__getitem__)


def test_a_share_of_a_store_with_late_values_and_commits_after_its_snapshot(store: Path) -> None:
    def check() -> None:
        for rank in (0, 2):
            alone, of_whole = shown_both_ways(store, rank, 3)
            assert alone == of_whole
            assert "error" not in alone

    with writer_to(store) as writer:
        writer.evict([2])
        check()
    annotate(store, [1, 39], {"score": [0.5, 0.25]})
    check()
    writer_to(store).close()  # which writes a snapshot
    check()
    assert "score" in shown(store, 1, 3)["facts"], "also where no trajectory has one"


# -- damage beneath a right checksum ------------------------------------------------------------------


def _changed(name: str, at: int, to: int) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        of = body["live"]["columns" if name in COLUMNS else "facts"]
        rows = array_from_json(of[name], of[name]["dtype"])
        rows[at] = to
        of[name] = array_to_json(rows)

    return change


def _packed(name: str, **changes: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        of = body["live"]["columns" if name in COLUMNS else "facts"]
        of[name] = {**of[name], **changes}

    return change


@pytest.mark.parametrize(
    ("name", "at", "to"),
    [
        *((name, 0, -5) for name in ("trajectory_id", "num_samples", "steps", "extra", "nbytes", "shard", "weights")),
        *((name, 17, 1 << 20) for name in ("num_samples", "batch", "extra", "shard", "weights", "task")),
        *((name, -1, 1 << 40) for name in ("start_samples", "start_extra", "version_low")),
        ("num_samples", 30, 1 << 62),
        ("agent", 30, 7),
    ],
)
def test_an_entry_that_is_wrong_is_refused_in_the_share_that_has_it(store: Path, name: str, at: int, to: int) -> None:
    with_it = int(at in (-1, 30))
    before = shown(store, 1 - with_it, 2)
    with forged_index(store) as body:
        _changed(name, at, to)(body)
    assert "trajectory_index.json" in shown(store, with_it, 2)["error"]
    assert shown(store, 1 - with_it, 2) == before
    assert not verify(store).sound


@pytest.mark.parametrize(
    "forge",
    [
        *(_packed(name, data=data) for name in ("steps", "task") for data in ("", "AAAA", "!", 7, None, ["A"], "AA==")),
        *(_packed("steps", shape=shape) for shape in ([1 << 40], [3], [-1], [1, 36], None)),
        *(_packed(name, dtype="<i2") for name in ("steps", "agent", "uuid")),
        _packed("uuid", data=""),
        _packed("uuid", data="AAAA" * 400),
        lambda body: body["live"]["columns"].pop("uuid"),
        lambda body: body["live"]["columns"].pop("nbytes"),
        lambda body: body["live"].pop("weights"),
        lambda body: body["live"].update(facts=[]),
    ],
)
def test_an_index_that_is_damaged_is_refused_in_every_share(store: Path, forge: Callable[[Any], object]) -> None:
    with forged_index(store) as body:
        forge(body)
    for rank in range(2):
        assert "trajectory_index.json" in shown(store, rank, 2)["error"]


# -- packed arrays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, -128, 127, 128, -(1 << 15), 1 << 15, 1 << 31, -(1 << 62)])
def test_differences_of_any_width(step: int) -> None:
    values = np.array([[0, 1 << 62], [step, -step], [(1 << 63) - 1, -5]] * 9, np.int64)
    assert np.array_equal(array_from_json(array_to_json(values), "<i8", 2), values)


def one_stream(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return a packed array of one stream, with differences of 64 bits."""
    data = np.diff(array, prepend=0).astype(np.int64).tobytes() if array.dtype.kind == "i" else array.tobytes()
    return {**array_to_json(array), "data": base64.b64encode(zlib.compress(data)).decode()}


def test_arrays_of_one_stream(store: Path) -> None:
    before = [shown(store, rank, 3) for rank in range(3)]
    with forged_index(store) as body:
        for columns in (body["live"]["columns"], body["live"]["facts"]):
            columns |= {name: one_stream(array_from_json(value, value["dtype"])) for name, value in columns.items()}
    assert [shown(store, rank, 3) for rank in range(3)] == before


def test_padding_within_base64_is_refused() -> None:
    value = array_to_json(np.random.default_rng(0).integers(0, 1 << 62, 8))
    text = value["data"]
    for data in (text[:60] + "QQ==" + text[64:], text[:64] + "QQ==" + text[64:], text + "QQ==", text[:-1], [text] * 2):
        with pytest.raises(CorruptStoreError, match="packed array"):
            array_from_json({**value, "data": data}, "<i8")


def _without_views(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_views(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_views(item) for item in value]
    return bytes(value).decode() if isinstance(value, memoryview) else value


LONG = "A" * 100


@pytest.mark.parametrize(
    ("text", "views"),
    [
        (f'{{"a":{{"data":["{LONG}","{LONG}B","short"]}},"b":{{"data":["short","{LONG}"],"c":[1,{{}},"x"]}}}}', 3),
        (f'{{"a":{{"data":["{LONG}",1,0]}}}}', 0),
        (f'{{"a":{{"data":["{LONG}","{LONG}\\"\\/"]}},"data":{{}}}}', 1),
        (f'{{"a":{{"data":"{LONG}"}},"b":[{{"data":"{LONG}B","data2":1}}]}}', 2),
        (f'{{"data":"{LONG}","c":{{"data":"short"}},"d":{{"data":""}}}}', 1),
        ('{"data":"short"}', 0),
        (f'{{"data":"{LONG}","data":"{LONG}B"}}', 0),  # the last one counts
        (f'{{"data":"{LONG}","c":{{"data":0}}}}', 0),
        (f'{{"data":"{LONG}","c":{{"data":1}}}}', 0),
        (f'{{"x\\"data":"{LONG}"}}', 0),
        (f'{{"x":"\\"data\\":\\"{LONG}"}}', 0),
        (f'{{"data":"{LONG}\\/"}}', 0),
        (f'{{"data":"{LONG}\\"","b":1}}', 0),
    ],
)
def test_long_arrays_are_parsed_without_a_copy(text: str, views: int) -> None:
    body = text.encode()
    value = parsed_arrays(b"xy" + body + b"z", 2, 2 + len(body))
    assert _without_views(value) == orjson.loads(body)
    assert str(value).count("<memory at") == views


@pytest.mark.parametrize(
    "text",
    [f'{{"data":"{LONG}', f'{{"data":"{LONG}"', f'{{"data":"A"data":"{LONG}"}}', f'{{"data":["{LONG}",}}', "", LONG],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parsed_arrays(text.encode(), 0, len(text))
