"""Damaged, hostile and foreign directories: one clear error of the documented kind, nothing lost, no code run."""

from __future__ import annotations

import contextlib
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forging import forged, forged_index, forged_log, forged_metadata
from tests.stores import keys_of, opened, reader_of, refused_to_all
from tools.mutate import pickles
from tools.mutate.pristine import agent_witness
from trajstore import TrajectoryReplayBuffer, errors
from trajstore.inspection.inspect import inspect
from trajstore.inspection.verify import verify
from trajstore.store.log_records import encode_line
from trajstore.store.packing import pack, unpack
from trajstore.store.sealed import METADATA_NAME, seal
from trajstore.testing.copies import copy_live
from trajstore.testing.witness import WitnessError, check_batch, witness

COUNT = 6


def build(path: Path, fmt: str, *, clean: bool = False) -> Path:
    """Make a store of six trajectories, four in its snapshot and two in its log; ``clean``: all in the snapshot."""
    live = path.with_name(f"live {path.name}")
    for keys in (range(4), range(4, COUNT)):
        with opened(live, trajectory_format=fmt) as buffer:
            for key in keys:
                buffer.add_trajectories([witness(key)])
                if key % 2:
                    buffer.flush()
            if keys.start == 0 or clean:
                buffer.points.pin("kept")
            else:
                copy_live(live, path)
    return live.rename(path) if clean else path


def read(path: Path) -> dict[int, int]:
    with TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False) as buffer:
        buffer.load_checkpoint(path)
        if len(buffer):
            check_batch(buffer.sample(50))
        return keys_of(buffer)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build(tmp_path_factory.mktemp("pristine") / "store", "pt")
    assert read(path) == {key: key for key in range(COUNT)}
    return path


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != "writer.lock" and p.parent.name != "readers")


# -- one kind of damage at a time -------------------------------------------------------------------


def test_a_damaged_record_within_the_log_is_refused_by_name_and_byte(store: Path) -> None:
    (segment,) = (store / "log").iterdir()
    line = encode_line({"generation": 99, "operation": "add"})
    segment.write_bytes(b"rubbish\n" + line)
    with pytest.raises(errors.CorruptStoreError, match=rf"{segment.name}.* byte 0"):
        read(store)
    segment.write_bytes(line)
    with pytest.raises(errors.CorruptStoreError, match="generation 99"):
        read(store)


@pytest.mark.parametrize(
    "operation", [{"operation": "prune"}, {"operation": "evict", "ids": [[3, 1]]}, {"operation": "add"}, {}]
)
def test_records_that_say_nothing_sensible(store: Path, operation: dict[str, Any]) -> None:
    with forged_log(store) as records:
        records[:] = [{"generation": records[0]["generation"], **operation}]
    with pytest.raises(errors.CorruptStoreError, match=r"log/\d+\.log"):
        read(store)


def test_a_newer_layout(store: Path) -> None:
    with forged_metadata(store) as values:
        values["layout_version"] = 99
    refused_to_all(store, errors.UnsupportedVersionError, r"metadata\.json.*version 99.*upgrade")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "shards/../../x", "shards//x", "a\0b", ""])
def test_names_that_leave_the_directory(store: Path, name: str) -> None:
    with forged_index(store) as value:
        value["shards"]["families"][0]["file_names"][0] = name
    (store.parent / "x").write_bytes(b"precious")
    refused_to_all(store, errors.UnsafeContentError)
    assert (store.parent / "x").read_bytes() == b"precious"


# -- found by tools/mutate --------------------------------------------------------------------------


def _more_samples_than_steps(value: Any) -> None:
    samples = value["live"]["columns"]["num_samples"]
    value["live"]["columns"]["num_samples"] = pack(unpack(samples, "<i8") + 1000)


def _epochs_that_do_not_divide_the_steps(value: Any) -> None:
    columns = value["live"]["columns"]
    columns["extra"] = pack(unpack(columns["extra"], "<i4") * 0 + 7)
    columns["steps"] = pack(unpack(columns["steps"], "<i4") * 0 + 1)


def _weights_that_are_no_text(value: Any) -> None:
    table = value["live"]["weights"]
    table["bytes"] = pack(np.frombuffer(b"\xe3" * table["bytes"]["shape"][0], "V1"))


def _a_place_in_no_file(value: Any) -> None:
    for family in value["shards"]["families"]:
        family["column_files"] = [-1] * len(family["column_files"])
        family["offsets"] = pack(np.full(family["offsets"]["shape"], 1 << 31))


def _of_column(number: int) -> Callable[[Any], None]:
    def axis(value: Any) -> None:
        value["shards"]["schemas"][0]["columns"][0][3] = number

    return axis


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (_more_samples_than_steps, "number of samples"),  # which would be read behind the end of the file's map
        (_epochs_that_do_not_divide_the_steps, "epochs"),  # rows would be computed that lie outside of the shard
        (_weights_that_are_no_text, "string table"),
        (_a_place_in_no_file, "lies in no file"),
        *((_of_column(axis), "not a trajectory schema") for axis in (3, 4, 5, -1)),
    ],
)
def test_an_index_that_somebody_forged_is_refused(store: Path, forge: Callable[[Any], None], message: str) -> None:
    with forged_index(store) as value:
        forge(value)
    with pytest.raises(errors.CorruptStoreError, match=message):
        read(store)
    assert not verify(store).sound


def test_a_shard_of_a_format_that_does_not_exist(tmp_path: Path) -> None:
    store = build(tmp_path / "store", "pkl")
    with forged_log(store) as records:
        records[0]["shard"]["format"] = "tape"
    with pytest.raises(errors.CorruptStoreError, match="'tape', which does not exist"):
        read(store)
    assert not verify(store).sound


@pytest.mark.parametrize("name", [METADATA_NAME, "pins/kept.json"])
@pytest.mark.parametrize(
    "value", [{"seed": []}, {"rng_state": 7}, *({"trajectory_format": form} for form in ("tape", [[]], 1 << 62))]
)
def test_a_state_that_no_buffer_can_take_up(store: Path, name: str, value: dict[str, Any]) -> None:
    with forged_metadata(store) if name == METADATA_NAME else forged(store / name, "pin") as values:
        values |= value
    with pytest.raises(errors.CorruptStoreError):
        TrajectoryReplayBuffer().load_checkpoint(store, pin=None if name == METADATA_NAME else "kept")
    assert [problem.file for problem in verify(store).problems] == [name]


def test_a_pin_that_names_what_was_never_committed(store: Path) -> None:
    with forged(store / "pins/kept.json", "pin") as pin:
        pin["ids"].append([900, 901])
    with pytest.raises(errors.CorruptStoreError, match="'kept' names 2 trajectories that are missing"):
        TrajectoryReplayBuffer().load_checkpoint(store, pin="kept")
    assert [problem.file for problem in verify(store).problems] == ["pins/kept.json"]
    read(store)  # all else is served


@pytest.mark.parametrize("generation", [[[]], -1, None, "7"])
def test_metadata_without_a_sensible_generation(store: Path, generation: Any) -> None:
    with forged_metadata(store) as values:
        values["generation"] = generation
    with pytest.raises(errors.CorruptStoreError, match=r"metadata\.json: generation"):
        read(store)


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_metadata_that_is_nested_deeply(store: Path, depth: int) -> None:
    file = store / METADATA_NAME
    file.write_bytes(file.read_bytes().rstrip(b"}") + b',"more":' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(errors.CorruptStoreError, match=r"metadata\.json"):
        read(store)


@pytest.mark.parametrize(
    "body", [b"[]", b'"x"', b"{}", b'{"ids":3}', b'{"ids":[],"step":1,"state":{"file":5,"size":1,"crc32":1}}']
)
def test_pins_that_name_nothing(store: Path, body: bytes) -> None:
    (store / "pins" / "kept.json").write_bytes(seal("pin", body))
    refused_to_all(store, errors.CorruptStoreError)
    assert not verify(store).sound


def test_pins_that_were_exchanged(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        for key, name in enumerate(("one", "two")):
            buffer.add_trajectories([witness(key)])
            buffer.points.pin(name)
    one, two = (tmp_path / "pins" / f"{name}.json" for name in ("one", "two"))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    with pytest.raises(errors.CorruptStoreError, match=r"one\.json: is the pin 'two'"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path, pin="one")
    assert not verify(tmp_path).sound


def test_metadata_of_another_store(store: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other", "pt")
    (store / METADATA_NAME).write_bytes((other / METADATA_NAME).read_bytes())
    (problem,) = verify(store).problems
    assert "belongs to another store" in str(problem)
    assert read(store) == {key: key for key in range(COUNT)}  # a checkpoint may be replaced while it is opened


@pytest.mark.parametrize(("old", "new"), [(b'"data_id"', b'"datX_id"'), (b'"outcome"', b'"outcomX"')])
def test_a_document_that_names_other_fields(tmp_path: Path, old: bytes, new: bytes) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        (number,) = buffer.add_trajectories([agent_witness(1)])
    (shard,) = (tmp_path / "shards").iterdir()
    data = shard.read_bytes()
    assert old in data
    shard.write_bytes(data.replace(old, new))
    with pytest.raises(errors.CorruptStoreError, match="does not describe a trajectory"):
        reader_of(tmp_path).get(number)
    assert inspect(tmp_path)["unreadable"] == 1


def test_columns_that_are_no_fields(store: Path) -> None:
    with forged_index(store) as value:
        value["shards"]["schemas"][0]["columns"][0][0] = "x"
    with pytest.raises(errors.CorruptStoreError):
        reader_of(store).get(0)
    assert not verify(store).sound


# -- code -------------------------------------------------------------------------------------------


def test_pickles_that_would_run_code(tmp_path: Path) -> None:
    """A shard of the right size with a pickle that calls something, in each format that has pickles."""
    fired = tmp_path / "fired"
    for fmt in ("pt", "pkl"):
        store = build(tmp_path / fmt, fmt, clean=True)
        for file in files_of(store / "shards"):
            size = file.stat().st_size
            bomb = pickles.code(fired, random.Random(file.name))
            if fmt == "pt":
                with zipfile.ZipFile(file, "w") as archive:
                    archive.writestr("archive/data.pkl", bomb)
                file.write_bytes(file.read_bytes().ljust(size, b"\0")[:size])
            else:
                file.write_bytes(bomb.ljust(size, b"\0"))
        with contextlib.suppress(errors.TrajstoreError, WitnessError):
            read(store)
        assert not verify(store).sound
        assert not fired.exists()
        if fmt == "pkl":
            with pytest.raises((errors.UnsafeContentError, errors.CorruptStoreError), match="shard_"):
                read(store)


def test_pickles_of_another_layout_are_no_shards(tmp_path: Path) -> None:
    store = build(tmp_path / "store", "pkl")
    for file in files_of(store / "shards"):
        file.write_bytes(file.read_bytes().replace(b"trajstore.shard", b"something else!"))
    with pytest.raises(errors.CorruptStoreError, match=r"shard_.*layout 'something else!'"):
        read(store)


# -- whose directory --------------------------------------------------------------------------------


def test_a_beginning_that_was_interrupted_is_begun_again(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / METADATA_NAME).unlink()
    with opened(tmp_path) as buffer:
        assert buffer.add_trajectories([witness(0)]) == [0]
    assert read(tmp_path) == {0: 0}


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises((errors.StoreError, OSError), match="file"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "file")
