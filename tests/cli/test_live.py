"""``verify`` and ``inspect`` beside a writer report lost files, but not evicted or moved ones."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import trajstore
from tests.cli.stores import Run, make_rollout
from trajstore import TrajectoryReplayBuffer
from trajstore._core.files.base import ReaderLease
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.holder import describe_holder, holder_document
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import open_directory
from trajstore._core.store.saved_points import Pins
from trajstore.errors import TrajectoryUnavailableError
from trajstore.operations.inspect import inspect
from trajstore.operations.trajectory_report import inspect_trajectory
from trajstore.operations.verify import verify
from trajstore.remote.directory import RemoteDirectory


@pytest.fixture
def live(tmp_path: Path) -> Iterator[TrajectoryReplayBuffer]:
    """Yield a writer with five trajectories in a shard each."""
    yield from _live(tmp_path / "run" / "rank_0")


def _live(path: Path) -> Iterator[TrajectoryReplayBuffer]:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer:
        for version in range(5):
            buffer.add_trajectories([make_rollout(version)])
            buffer.flush()
        yield buffer


@pytest.fixture(params=["lease", "no lease"])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the live store's path; without leases, ``readers/`` is read-only."""
    if request.param == "no lease":
        store = tmp_path / "run" / "rank_0"
        store.mkdir(parents=True)
        (store / "readers").write_bytes(b"")
    return tmp_path / "run" / "rank_0"


def at_first(act: Callable[[], object]) -> Callable[[int, int], None]:
    """Return a progress callback that runs an action once."""
    left = [act]

    def progress(done: int, total: int) -> None:
        if left:
            left.pop()()

    return progress


def before_first(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], object]) -> None:
    """Run an action right before the first call of a method."""
    method, left = getattr(owner, name), [act]

    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return method(self, *arguments, **options)

    monkeypatch.setattr(owner, name, called)


def test_what_is_moved_while_it_is_verified_is_checked_where_it_is(path: Path, live: TrajectoryReplayBuffer) -> None:
    def move() -> None:
        live.evict([4])
        live.compact()

    result = verify(path, at_first(move))
    assert result.sound, result.problems
    assert result.trajectories == (5 if (path / "readers").is_dir() else 4)
    assert ("1 trajectory was evicted before the check" in result.notes) is (result.trajectories == 4)


def test_what_is_damaged_where_it_was_moved_to_is_told(tmp_path: Path, live: TrajectoryReplayBuffer) -> None:
    path = tmp_path / "run" / "rank_0"

    def move_and_damage() -> None:
        before = set((path / "shards").iterdir())
        live.compact()
        for old in before:
            old.unlink(missing_ok=True)  # as if no reader had a lease
        (moved,) = (path / "shards").iterdir()
        moved.write_bytes(moved.read_bytes()[:-1])

    result = verify(path, at_first(move_and_damage))
    assert [problem.lost for problem in result.problems] == [((0, 4),)]


def test_a_saved_point_that_is_released_while_it_is_verified(
    path: Path, live: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.points.save(1, state={"at": 1})

    def go_on() -> None:
        live.points.save(2, state={"at": 2}, keep=1)

    before_first(monkeypatch, Pins, "read", go_on)
    result = verify(path)
    assert result.sound, result.problems
    assert not result.notes
    next((path / "pins").glob("*.state")).unlink()
    assert not verify(path).sound


def test_what_is_evicted_while_it_is_inspected_is_no_damage(
    path: Path, live: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_first(monkeypatch, LocalDirectory, "sizes", lambda: live.evict([2, 3]))
    report = inspect(path)
    assert report["integrity"]["problems"] == []
    assert report["trajectories"] == 5


def test_one_trajectory_that_moves_or_goes_while_it_is_read(
    path: Path, live: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        before_first(once, LocalDirectory, "map", live.compact)
        assert inspect_trajectory(path, 2)["samples"] == 18
    with monkeypatch.context() as once:
        before_first(once, LocalDirectory, "map", live.clear)
        if (path / "readers").is_dir():
            assert inspect_trajectory(path, 2)["samples"] == 18
        else:
            with pytest.raises(TrajectoryUnavailableError):
                inspect_trajectory(path, 2)


def test_a_store_that_nobody_writes_gets_no_file(store: Path) -> None:
    before = sorted(store.rglob("*"))
    times = [file.stat().st_mtime_ns for file in before]
    assert verify(store).sound
    assert not inspect(store)["integrity"]["problems"]
    inspect_trajectory(store, 2)
    assert sorted(store.rglob("*")) == before
    assert [file.stat().st_mtime_ns for file in before] == times


def test_files_of_a_live_writer_are_not_said_to_be_left(path: Path, live: TrajectoryReplayBuffer) -> None:
    (path / "shards" / "shard_00000099.pt").write_bytes(b"comes")
    (note,) = verify(path).notes
    assert note.startswith("1 file in shards/ is named by no commit now: its writer adds them")
    live.close()
    (note,) = verify(path).notes
    assert note == "1 file in shards/ is named by no commit; the next writer removes them"
    (path / "shards" / "shard_00000099.pt").rename(path / "shards" / "shard_00000000.pt.tmp")
    (note,) = verify(path).notes
    assert note.endswith("; what they held was evicted or is elsewhere: the next writer removes them")


def test_inspect_shows_who_reads(path: Path, live: TrajectoryReplayBuffer, run: Run) -> None:
    assert inspect(path)["writer"]["version"] == trajstore.__version__
    assert inspect(path)["readers"] == []
    assert "readers" not in run("inspect", path)[1]
    if not (path / "readers").is_dir():
        return
    with TrajectoryReplayBuffer.open(path):
        (reader,) = inspect(path)["readers"]
        (line,) = [line.split() for line in run("inspect", path)[1].splitlines() if line.startswith("  readers")]
        assert line == f"readers {reader['holder']}, generation 5".split()


@pytest.mark.parametrize("leased", [True, False])
def test_a_live_store_in_an_object_store(memory_url: str, leased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = open_directory(memory_url)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, sample_window_size=0) as buffer:
        for version in range(5):
            buffer.add_trajectories([make_rollout(version)])
            buffer.flush()
        if not leased:
            monkeypatch.setattr(RemoteDirectory, "announce_reader", lambda self, generation=0: ReaderLease())
        result = verify(memory_url, at_first(lambda: buffer.evict([2, 3])))
        assert result.sound, result.problems
        assert result.trajectories == (5 if leased else 3)
        assert directory.readers() == []
        directory.remove(directory.names("shards")[-1:])
        assert not verify(memory_url).sound
        assert inspect(memory_url)["integrity"]["problems"]
    before = directory.names()
    monkeypatch.undo()
    verify(memory_url)
    inspect(memory_url)
    assert directory.names() == before
    assert not directory.is_written()


def test_leases_that_may_not_be_read(path: Path, live: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a folder created by another user's reader with private permissions."""
    with TrajectoryReplayBuffer.open(path):
        files = inspect(path)["files"]
        open_folder = HeldFolder.open_folder

        def refused(self: HeldFolder, name: str = "") -> int:
            if name.startswith("readers"):
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return open_folder(self, name)

        monkeypatch.setattr(HeldFolder, "open_folder", refused)
        report = inspect(path)
        assert report["integrity"]["problems"] == []
        if (path / "readers").is_dir():
            assert report["readers"] is None
        assert report["files"] == files
        assert verify(path).sound
        monkeypatch.undo()


def test_whether_a_writer_lives(tmp_path: Path) -> None:
    directory, lock = LocalDirectory(tmp_path), tmp_path / "writer.lock"
    assert not directory.is_written()
    with directory.lock_writer():
        assert directory.is_written()
    assert not directory.is_written()
    holder = {**holder_document(), "pid": ended_process()}
    lock.write_bytes(orjson.dumps(holder))
    assert not directory.is_written(), "it was killed"
    assert "trajstore" not in describe_holder(orjson.dumps(holder)), "it has this version"
    assert describe_holder(orjson.dumps({**holder, "version": "9.1"})).endswith(" (trajstore 9.1)")
    lock.write_bytes(orjson.dumps({**holder, "host": "elsewhere"}))
    assert directory.is_written(), "unknown here, so assumed"
    lock.write_bytes(b"{")
    assert directory.is_written()


def ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid
