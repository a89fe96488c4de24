"""A log that lost its end: told where anything tells of it, and nothing goes without a word."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import add_each, contents_of, keys_at, keys_of, opened, refused_to_all, writer_to
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import CorruptStoreError
from trajstore.inspection.copying import repair_store
from trajstore.inspection.inspect import inspect
from trajstore.inspection.verify import verify
from trajstore.store.lost_records import Damage, LostRecords
from trajstore.testing.copies import copy_live, tell_ids


def killed(folder: Path, *, pinned: bool, renewed: int = 0) -> Path:
    """Return the store of a process that was killed after six commits; a pin is made after the fourth.

    Its metadata were renewed when so many trajectories were committed.
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
    refused_to_all(path, CorruptStoreError, f"ends with generation {lines}, and pins/step-1.json was made at")
    found = verify(path)
    assert not found.sound
    assert any("the log was cut or lost" in problem.message for problem in found.problems)
    assert "the log was cut or lost" in str(inspect(path)["integrity"]["problems"])
    assert keys_at(path, strict=False) == {key: key for key in range(lines)}
    if lines:
        repair_store(path, tmp_path / "new")
        assert contents_of(tmp_path / "new") == list(range(lines))
    assert len(list((path / "shards").iterdir())) == 6


def test_a_pin_tells_where_log_and_metadata_are_lost_together(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=True)
    shutil.rmtree(path / "log")
    (path / "metadata.json").write_bytes(b"\xff")
    assert any("names 4 trajectories" in one.message and one.uncounted for one in verify(path).problems)


@pytest.mark.parametrize("whole_segment", [False, True])
def test_ids_that_the_metadata_know_to_be_committed_tell(tmp_path: Path, whole_segment: bool) -> None:
    path = killed(tmp_path, pinned=False, renewed=5)
    if whole_segment:
        (segment,) = (path / "log").iterdir()
        segment.unlink()
    else:
        cut(path, 3)
    left = 0 if whole_segment else 3
    said = r"(ends with id 2|has no trajectory), and by metadata\.json all ids up to 4 were"
    refused_to_all(path, CorruptStoreError, said)
    assert len(list((path / "shards").iterdir())) == 6
    (problem,) = verify(path).problems
    assert (problem.lost, problem.uncounted) == (((left, 4),), True)
    assert "the log was cut or lost" in str(inspect(path)["integrity"]["problems"])
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        assert reader.load_checkpoint(path, strict=False) == 5 - left
        assert list(keys_of(reader)) == list(range(left))


def test_a_log_that_lost_no_more_than_its_last_second_is_an_interrupted_commit(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=False, renewed=5)
    cut(path, 5)
    assert contents_of(path) == list(range(5))


def test_a_cut_before_which_every_pin_was_made_is_an_older_moment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = killed(tmp_path, pinned=True)
    cut(path, 5)
    found = verify(path)
    assert found.sound
    assert any("1 files in shards/ are named by no commit" in note for note in found.notes)
    with caplog.at_level(logging.WARNING), opened(path) as buffer:
        assert list(keys_of(buffer)) == list(range(5))
    assert "deletes 1 files of shards that no commit names" in caplog.text


def test_a_damaged_line_feed_at_the_end_is_damage(tmp_path: Path) -> None:
    path = killed(tmp_path, pinned=False)
    (segment,) = (path / "log").iterdir()
    segment.write_bytes(segment.read_bytes()[:-1] + b"\x0b")
    found = verify(path)
    assert [problem.file for problem in found.problems] == [f"log/{segment.name}"]
    assert "the line feed of its last record is damaged" in found.problems[0].message
    refused_to_all(path, CorruptStoreError, "the line feed of the record at byte")
    repair_store(path, tmp_path / "new")
    assert contents_of(tmp_path / "new") == list(range(6))


# -- What is lost where records of a log cannot be read, told by the ids of their neighbours --


def added(*ranges: list[int]) -> dict[str, Any]:
    return {"operation": "add", "entries": {"ids": list(ranges)}}


def settled(*steps: Any, present: list[int], next_id: int = 0, counter: int = 0) -> Damage:
    """Return the damage of a log: records that were read, and None where some are missing."""
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
    assert str(damage) == "log; what was committed there is left out; lost: 3 trajectories, ids 3 to 5"


def test_what_was_evicted_later_is_not_lost() -> None:
    evicted = {"operation": "evict", "ids": [[4, 4], [0, 0]]}
    assert settled(added([0, 2]), None, evicted, added([6, 6]), present=[1, 2, 6]).lost == ((3, 3), (5, 5))


def test_ids_begin_where_the_snapshot_ends() -> None:
    assert settled(None, added([12, 12]), present=[12], next_id=10).lost == ((10, 11),)


def test_ids_of_one_of_several_ranks() -> None:
    here = [*range(1, 40, 4), *range(49, 80, 4)]
    records = [added([one, one]) for one in here]
    assert settled(*records[:10], None, *records[10:], present=here).lost == ((41, 41), (45, 45))
    assert settled(added([1, 1]), None, added([9, 9]), present=[1, 9]).lost == ((2, 8),), "two ids tell no stride"


@pytest.mark.parametrize(("counter", "lost", "uncounted"), [(0, (), True), (3, (), True), (5, ((3, 4),), True)])
def test_the_end_of_a_log(counter: int, lost: tuple[tuple[int, int], ...], uncounted: bool) -> None:
    damage = settled(added([0, 2]), None, present=[0, 1, 2], counter=counter)
    assert (damage.lost, damage.uncounted) == (lost, uncounted)


@pytest.mark.parametrize("record", [added([1 << 60, 1 << 60]), {"operation": "add"}, added([5, 4]), {"operation": 7}])
def test_forged_numbers_say_nothing(record: dict[str, Any]) -> None:
    damage = settled(added([0, 2]), None, record, present=[0, 1, 2])
    assert (damage.lost, damage.uncounted) == ((), True)
    assert str(damage).endswith("lost: trajectories that nobody can count, if any")
