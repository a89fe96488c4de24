"""A log that lost its end: told where anything tells of it, and nothing goes without a word."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from trajstore import TrajectoryReplayBuffer
from trajstore.errors import CorruptStoreError
from trajstore.inspection.copying import repair_store
from trajstore.inspection.inspect import inspect
from trajstore.inspection.verify import verify
from trajstore.testing.copies import copy_live, tell_ids
from trajstore.testing.witness import check_trajectory, witness


def killed(path: Path, *, pinned: bool, renewed: int = 0) -> None:
    """Leave the store of a process that was killed after six commits; a pin is made after the fourth.

    Its metadata were renewed when so many trajectories were committed.
    """
    live = path.with_name("live")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=live) as buffer:
        for key in range(6):
            buffer.add_trajectories([witness(key)])
            buffer.flush()
            if key == 3 and pinned:
                buffer.points.save(1)
        copy_live(live, path, "writer.lock", "readers")
        tell_ids(path, renewed)


def cut(path: Path, lines: int) -> None:
    (segment,) = (path / "log").iterdir()
    whole = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(whole[:lines]))


def keys(buffer: TrajectoryReplayBuffer) -> list[int]:
    return [check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist()]


@pytest.mark.parametrize("lines", [0, 2])
def test_a_pin_of_a_later_commit_tells(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "store"
    killed(path, pinned=True)
    cut(path, lines)
    for opened in (
        lambda: TrajectoryReplayBuffer.open(path),
        lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=path),
    ):
        with pytest.raises(CorruptStoreError, match=f"ends with generation {lines}, and pins/step-1.json was made at"):
            opened()
    found = verify(path)
    assert not found.sound
    assert any("the log was cut or lost" in problem.message for problem in found.problems)
    assert "the log was cut or lost" in str(inspect(path)["integrity"]["problems"])
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(path, strict=False)
        assert keys(reader) == list(range(lines))
    if lines:
        repair_store(path, tmp_path / "new")
        with TrajectoryReplayBuffer.open(tmp_path / "new") as reader:
            assert keys(reader) == list(range(lines))
    assert len(list((path / "shards").iterdir())) == 6


def test_a_pin_tells_where_log_and_metadata_are_lost_together(tmp_path: Path) -> None:
    path = tmp_path / "store"
    killed(path, pinned=True)
    shutil.rmtree(path / "log")
    (path / "metadata.json").write_bytes(b"\xff")
    assert any("names 4 trajectories" in one.message and one.uncounted for one in verify(path).problems)


@pytest.mark.parametrize("whole_segment", [False, True])
def test_ids_that_the_metadata_know_to_be_committed_tell(tmp_path: Path, whole_segment: bool) -> None:
    path = tmp_path / "store"
    killed(path, pinned=False, renewed=5)
    if whole_segment:
        (segment,) = (path / "log").iterdir()
        segment.unlink()
    else:
        cut(path, 3)
    left = 0 if whole_segment else 3
    for opened in (
        lambda: TrajectoryReplayBuffer.open(path),
        lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=path),
    ):
        with pytest.raises(
            CorruptStoreError, match=r"(ends with id 2|has no trajectory), and by metadata\.json all ids up to 4 were"
        ):
            opened()
    assert len(list((path / "shards").iterdir())) == 6
    (problem,) = verify(path).problems
    assert (problem.lost, problem.uncounted) == (((left, 4),), True)
    assert "the log was cut or lost" in str(inspect(path)["integrity"]["problems"])
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        assert reader.load_checkpoint(path, strict=False) == 5 - left
        assert keys(reader) == list(range(left))


def test_a_log_that_lost_no_more_than_its_last_second_is_an_interrupted_commit(tmp_path: Path) -> None:
    path = tmp_path / "store"
    killed(path, pinned=False, renewed=5)
    cut(path, 5)
    with TrajectoryReplayBuffer.open(path) as reader:
        assert keys(reader) == list(range(5))


def test_a_cut_before_which_every_pin_was_made_is_an_older_moment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    killed(path, pinned=True)
    cut(path, 5)
    found = verify(path)
    assert found.sound
    assert any("1 files in shards/ are named by no commit" in note for note in found.notes)
    with (
        caplog.at_level(logging.WARNING),
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer,
    ):
        assert keys(buffer) == list(range(5))
    assert "deletes 1 files of shards that no commit names" in caplog.text


def test_a_damaged_line_feed_at_the_end_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "store"
    killed(path, pinned=False)
    (segment,) = (path / "log").iterdir()
    segment.write_bytes(segment.read_bytes()[:-1] + b"\x0b")
    found = verify(path)
    assert [problem.file for problem in found.problems] == [f"log/{segment.name}"]
    assert "the line feed of its last record is damaged" in found.problems[0].message
    for opened in (
        lambda: TrajectoryReplayBuffer.open(path),
        lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=path),
    ):
        with pytest.raises(CorruptStoreError, match="the line feed of the record at byte"):
            opened()
    repair_store(path, tmp_path / "new")
    with TrajectoryReplayBuffer.open(tmp_path / "new") as reader:
        assert keys(reader) == list(range(6))
