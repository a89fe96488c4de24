"""Damaged, hostile and foreign directories: one clear documented error, no loss, no code run."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forging import forged, forged_index, forged_log, forged_metadata
from tests.stores import add_each, contents_of, keys_at, keys_of, opened, reader_of, refused_to_all, writer_to
from tests.support.copies import copy_live, tell_ids
from tests.support.witness import WitnessError, check_batch, witness
from tools.mutate import pickles
from tools.mutate.pristine import agent_witness
from trajstore import TrajectoryReplayBuffer, annotate, errors
from trajstore._core.store.json_arrays import array_from_json, array_to_json
from trajstore._core.store.log_records import encode_line
from trajstore._core.store.lost_records import Damage, LostRecords
from trajstore._core.store.sealed import METADATA_NAME, seal
from trajstore.errors import CorruptStoreError
from trajstore.operations.copying import repair_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify

COUNT = 6


def build(path: Path, fmt: str, *, clean: bool = False) -> Path:
    """Make a store of six trajectories, four in the snapshot and two in the log; ``clean``: all in the snapshot."""
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


# -- single faults -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("version", [0, 2, 7, 99])
def test_another_layout_version(store: Path, version: int) -> None:
    with forged_metadata(store) as values:
        values["layout_version"] = version
    message = rf"metadata\.json: has layout version {version}, and this trajstore reads version 1 only"
    refused_to_all(store, errors.UnsupportedVersionError, message)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "shards/../../x", "shards//x", "a\0b", ""])
def test_names_that_leave_the_directory(store: Path, name: str) -> None:
    with forged_index(store) as value:
        value["shards"]["families"][0]["file_names"][0] = name
    (store.parent / "x").write_bytes(b"precious")
    refused_to_all(store, errors.UnsafeContentError)
    assert (store.parent / "x").read_bytes() == b"precious"


# -- found by tools/mutate ---------------------------------------------------------------------------


def _more_samples_than_steps(value: Any) -> None:
    samples = value["live"]["columns"]["num_samples"]
    value["live"]["columns"]["num_samples"] = array_to_json(array_from_json(samples, "<i8") + 1000)


def _epochs_that_do_not_divide_the_steps(value: Any) -> None:
    columns = value["live"]["columns"]
    columns["extra"] = array_to_json(array_from_json(columns["extra"], "<i4") * 0 + 7)
    columns["steps"] = array_to_json(array_from_json(columns["steps"], "<i4") * 0 + 1)


def _weights_that_are_no_text(value: Any) -> None:
    table = value["live"]["weights"]
    table["bytes"] = array_to_json(np.frombuffer(b"\xe3" * table["bytes"]["shape"][0], "V1"))


def _a_place_in_no_file(value: Any) -> None:
    for family in value["shards"]["families"]:
        family["column_files"] = [-1] * len(family["column_files"])
        family["offsets"] = array_to_json(np.full(family["offsets"]["shape"], 1 << 31))


def _of_another_axis(axis: int, value: Any) -> None:
    value["shards"]["schemas"][0]["columns"][0][3] = axis


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (_more_samples_than_steps, "number of samples"),  # would read past the end of the mapped file
        (_epochs_that_do_not_divide_the_steps, "epochs"),  # would compute rows outside of the shard
        (_weights_that_are_no_text, "string table"),
        (_a_place_in_no_file, "lies in no file"),
        *((partial(_of_another_axis, axis), "not a trajectory schema") for axis in (3, 4, 5, -1)),
    ],
)
def test_an_index_that_somebody_forged_is_refused(store: Path, forge: Callable[[Any], None], message: str) -> None:
    with forged_index(store) as value:
        forge(value)
    with pytest.raises(errors.CorruptStoreError, match=message or None):
        read(store)
    assert not verify(store).sound


def test_a_shard_of_a_format_that_does_not_exist(tmp_path: Path) -> None:
    store = build(tmp_path / "store", "pkl")
    with forged_log(store) as records:
        records[0]["shards"][0]["shard"]["format"] = "tape"
    with pytest.raises(errors.CorruptStoreError, match="'tape', which does not exist"):
        read(store)
    assert not verify(store).sound


@pytest.mark.parametrize("name", [METADATA_NAME, "pins/kept.json"])
@pytest.mark.parametrize(
    "value",
    [
        *({"seed": seed} for seed in ([], 1e30)),
        {"rng_state": 7},
        *({"trajectory_format": form} for form in ("tape", [[]], 1 << 62)),
    ],
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
    read(store)  # everything else is readable


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


def test_pins_with_unknown_shards_of_values(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([witness(1)])
        annotate(buffer, 0, {"rows": [torch.zeros(witness(1).rewards.shape[:2])]})  # type: ignore[union-attr]
        buffer.points.pin("kept")
    with forged(tmp_path / "pins" / "kept.json", "pin") as value:
        value["shards"][0] = 1 << 31
    with pytest.raises(errors.CorruptStoreError, match="'kept': shards of rows are missing"):
        TrajectoryReplayBuffer.open(tmp_path, pin="kept")
    assert [str(problem) for problem in verify(tmp_path).problems if "shards of rows are missing" in str(problem)]


def test_pins_that_were_exchanged(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        for key, name in enumerate(("one", "two")):
            buffer.add_trajectories([witness(key)])
            buffer.points.pin(name)
    path, other = (tmp_path / "pins" / f"{name}.json" for name in ("one", "two"))
    first = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(first)
    with pytest.raises(errors.CorruptStoreError, match=r"one\.json: has the name 'two'"):
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
    assert not verify(tmp_path).sound


def test_columns_that_are_no_fields(store: Path) -> None:
    with forged_index(store) as value:
        value["shards"]["schemas"][0]["columns"][0][0] = "x"
    with pytest.raises(errors.CorruptStoreError):
        reader_of(store).get(0)
    assert not verify(store).sound


# -- pickles with code -------------------------------------------------------------------------------


def test_pickles_that_would_run_code(tmp_path: Path) -> None:
    """A correctly sized shard with a pickle that calls a function, in each pickled format."""
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


# -- ownership of the directory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost", [(), ("trajectory_index.json",), ("index_copy.json",)]
)  # names reach the disk in any order
def test_a_beginning_that_was_interrupted_is_begun_again(tmp_path: Path, lost: tuple[str, ...]) -> None:
    opened(tmp_path).close()
    for name in (METADATA_NAME, *lost):
        (tmp_path / name).unlink()
    with opened(tmp_path) as buffer:
        assert buffer.add_trajectories([witness(0)]) == [0]
    assert read(tmp_path) == {0: 0}


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises((errors.StoreError, OSError), match="file"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "file")


# -- A truncated log is reported by every record of later commits, and no loss goes unreported --


def killed(folder: Path, *, pinned: bool, renewed: int = 0) -> Path:
    """Return the store of a process killed after six commits, optionally with a pin after the fourth.

    ``renewed``: the number of trajectories committed at the last renewal of its metadata.
    """
    with writer_to(folder / "live") as buffer:
        add_each(buffer, range(4))
        if pinned:
            buffer.points.save(1)
        add_each(buffer, range(4, 6))
        path = copy_live(folder / "live", folder / "store", "writer.lock", "readers")
    tell_ids(path, renewed)
    return path


def cut(path: Path, lines: int) -> None:
    (segment,) = (path / "log").iterdir()
    whole = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(whole[:lines]))


@pytest.mark.parametrize("lines", [0, 2])
def test_a_pin_of_a_later_commit_tells(tmp_path: Path, lines: int) -> None:
    path = killed(tmp_path, pinned=True)
    cut(path, lines)
    refused_to_all(path, CorruptStoreError, f"ends with generation {lines}, and pins/step-1.0.json was made at")
    report = verify(path)
    assert not report.sound
    assert any("the log was cut or lost" in problem.message for problem in report.problems)
    assert "the log was cut or lost" in str(inspect(path)["integrity"]["problems"])
    assert keys_at(path, strict=False) == {key: key for key in range(6)}, "by the labels of their shards"
    assert repair_store(path, tmp_path / "new").is_whole
    assert contents_of(tmp_path / "new") == list(range(6))
    assert len(list((path / "shards").iterdir())) == 6


def test_a_pin_tells_where_log_and_metadata_are_lost_together(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=True)
    shutil.rmtree(path / "log")
    (path / "metadata.json").write_bytes(b"\xff")
    assert any("names 4 trajectories" in problem.message and problem.uncounted for problem in verify(path).problems)


@pytest.mark.parametrize("whole_segment", [False, True])
def test_ids_that_the_metadata_know_to_be_committed_tell(tmp_path: Path, whole_segment: bool) -> None:
    path = killed(tmp_path, pinned=False, renewed=5)
    if whole_segment:
        (segment,) = (path / "log").iterdir()
        segment.unlink()
    else:
        cut(path, 3)
    message = r"(ends with id 2|has no trajectory), and by metadata\.json all ids up to 4 were"
    refused_to_all(path, CorruptStoreError, message)
    assert len(list((path / "shards").iterdir())) == 6
    (problem,) = verify(path).problems
    assert (problem.lost, problem.uncounted) == ((), False)
    assert "the log was cut or lost" in str(inspect(path)["integrity"]["problems"])
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        assert reader.load_checkpoint(path, strict=False) == 0
        assert list(keys_of(reader)) == list(range(6))


def test_a_log_that_lost_no_more_than_its_last_second_is_an_interrupted_commit(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=False, renewed=5)
    cut(path, 5)
    assert contents_of(path) == list(range(5))


def test_a_cut_before_which_every_pin_was_made_is_an_older_moment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = killed(tmp_path, pinned=True)
    cut(path, 5)
    report = verify(path)
    assert report.sound
    held = "1 file in shards/ is named by no commit; they hold trajectory 5: `trajstore repair` brings them back"
    assert any(held in note for note in report.notes)
    with caplog.at_level(logging.WARNING), opened(path) as buffer:
        assert list(keys_of(buffer)) == list(range(5))
    assert "deletes 1 file of shards that no commit names" in caplog.text


@pytest.mark.parametrize("leftover", ["none", "half a shard", "compacted", "evicted"])
def test_repair_brings_back_what_a_torn_log_no_longer_names(tmp_path: Path, leftover: str) -> None:
    """Acknowledged rollouts stay in shards if a disk loses the end of the log; evicted and moved ones do not return."""
    live, path = tmp_path / "live", tmp_path / "store"
    with writer_to(live) as buffer:
        add_each(buffer, range(4))
        old = {file.name: file.read_bytes() for file in (live / "shards").iterdir()}
        buffer.evict([1])
        add_each(buffer, range(4, 6))
        copy_live(live, path, "writer.lock", "readers")
    tell_ids(path, 4)
    (segment,) = (path / "log").iterdir()
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:-2]) + lines[-2][:-20])
    shards, whole = path / "shards", old["shard_00000003.pt"]
    if leftover == "half a shard":
        (shards / "shard_00000007.pt").write_bytes(whole[: len(whole) // 2])
    if leftover == "compacted":  # a later shard of a committed trajectory: moved, without its record
        (shards / "shard_00000007.pt").write_bytes(whole)
    if leftover == "evicted":  # kept for a reader
        (shards / "shard_00000001.pt").write_bytes(old["shard_00000001.pt"])
    report = verify(path)
    assert report.sound
    assert "they hold 2 trajectories, ids 4 to 5: `trajstore repair` brings them back" in str(report.notes)
    repaired = repair_store(path, tmp_path / "new")
    assert repaired.is_whole
    assert "brought back from shards that no commit names: 2 trajectories, ids 4 to 5" in repaired.notes
    assert keys_at(tmp_path / "new") == {key: key for key in (0, 2, 3, 4, 5)}
    assert contents_of(path) == [0, 2, 3], "a writer keeps what was committed"


def test_repair_leaves_the_shards_of_a_live_writer_to_it(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=False, renewed=5)
    cut(path, 5)
    shard = (path / "shards" / "shard_00000005.pt").read_bytes()
    with opened(path) as buffer:
        (path / "shards" / "shard_00000005.pt").write_bytes(shard)
        assert repair_store(path, tmp_path / "new").trajectories == 5 == len(buffer)


def test_a_damaged_line_feed_at_the_end_is_damage(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=False)
    (segment,) = (path / "log").iterdir()
    segment.write_bytes(segment.read_bytes()[:-1] + b"\x0b")
    report = verify(path)
    assert [problem.file for problem in report.problems] == [f"log/{segment.name}"]
    assert "the line feed of its last record is damaged" in report.problems[0].message
    refused_to_all(path, CorruptStoreError, "the line feed of the record at byte")
    repair_store(path, tmp_path / "new")
    assert contents_of(tmp_path / "new") == list(range(6))


# -- Losses from unreadable log records, inferred from the neighbouring ids --


def added(*ranges: list[int]) -> dict[str, Any]:
    return {"operation": "add", "shards": [{"entries": {"ids": list(ranges)}}]}


def settled(*steps: Any, present: list[int], next_id: int = 0, counter: int = 0) -> Damage:
    """Return the damage of a log with these records; None stands for missing ones."""
    records, damage = LostRecords(), Damage("log")
    records.begins(next_id)
    for step in steps:
        if step is None:
            records.missing(damage)
        else:
            records.read(step)
    records.settle(np.array(present, np.int64), counter)
    return damage


def test_what_lies_between_two_records() -> None:
    damage = settled(added([0, 2]), None, added([6, 6], [8, 9]), present=[0, 1, 2, 6, 8, 9])
    assert (damage.lost, damage.count, damage.uncounted) == (((3, 5),), 3, False)
    assert str(damage) == "log; what was committed there and no shard has is left out; lost: 3 trajectories, ids 3 to 5"


def test_what_was_evicted_later_is_not_lost() -> None:
    evicted = {"operation": "evict", "ids": [[4, 4], [0, 0]]}
    assert settled(added([0, 2]), None, evicted, added([6, 6]), present=[1, 2, 6]).lost == ((3, 3), (5, 5))


def test_ids_begin_where_the_snapshot_ends() -> None:
    assert settled(None, added([12, 12]), present=[12], next_id=10).lost == ((10, 11),)


def test_ids_of_one_of_several_ranks() -> None:
    here = [*range(1, 40, 4), *range(49, 80, 4)]
    records = [added([number, number]) for number in here]
    assert settled(*records[:10], None, *records[10:], present=here).lost == ((41, 41), (45, 45))
    assert settled(added([1, 1]), None, added([9, 9]), present=[1, 9]).lost == ((2, 8),), "two ids give no stride"


@pytest.mark.parametrize(("counter", "lost", "uncounted"), [(0, (), True), (3, (), True), (5, ((3, 4),), False)])
def test_the_end_of_a_log(counter: int, lost: tuple[tuple[int, int], ...], uncounted: bool) -> None:
    damage = settled(added([0, 2]), None, present=[0, 1, 2], counter=counter)
    assert (damage.lost, damage.uncounted) == (lost, uncounted)


@pytest.mark.parametrize("record", [added([1 << 60, 1 << 60]), {"operation": "add"}, added([5, 4]), {"operation": 7}])
def test_forged_numbers_say_nothing(record: dict[str, Any]) -> None:
    damage = settled(added([0, 2]), None, record, present=[0, 1, 2])
    assert (damage.lost, damage.uncounted) == ((), True)
    assert str(damage).endswith("lost: an unknown number of trajectories, perhaps none")
