"""Directories moved, removed, replaced or modified while a buffer has them open."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.stores import add_each, contents_of, opened, reader_of
from tests.support.witness import check_batch, check_trajectory
from tools.crash.forked import forking
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions, errors
from trajstore._core.files.local import LocalDirectory
from trajstore._core.writing import opening
from trajstore.errors import StoreNotFoundError
from trajstore.operations.verify import verify

# -- writers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["pt", "zarr"])
def test_a_relative_store_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with opened("rel", trajectory_format=fmt, enable_cache=False) as buffer:
        add_each(buffer, [0])
        monkeypatch.chdir(tmp_path / "elsewhere")
        add_each(buffer, [1, 2])
        buffer.points.pin("kept")
        check_batch(buffer.sample(64))
        buffer.save_checkpoint("checkpoint")
        assert buffer._path == "rel"
    assert contents_of(tmp_path / "rel") == contents_of("checkpoint") == [0, 1, 2]
    assert os.listdir(tmp_path / "elsewhere") == ["checkpoint"]
    assert verify(tmp_path / "rel").sound


def test_a_relative_path_in_a_working_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for call in (opened, TrajectoryReplayBuffer.open, verify):
        with pytest.raises(StoreNotFoundError, match="run: is relative, and the working directory was removed"):
            call("run")


def test_a_store_that_is_moved_is_written_where_it_is_now(tmp_path: Path) -> None:
    with opened(tmp_path / "run", retention=Retention(max_trajectories=3)) as buffer:
        add_each(buffer, [0, 1])
        os.rename(tmp_path / "run", tmp_path / "run_old")
        add_each(buffer, [2, 3])
        buffer.clear_cache()
        check_batch(buffer.sample(64))
        buffer.evict([1])
        with pytest.raises(errors.StoreLockedError):
            opened(tmp_path / "run_old")
        with opened(tmp_path / "run") as other:
            add_each(other, [9])
            add_each(buffer, [4])
    assert contents_of(tmp_path / "run_old") == [2, 3, 4]
    assert contents_of(tmp_path / "run") == [9]
    assert verify(tmp_path).sound


@pytest.mark.parametrize("part", ["", "shards", "log"])
def test_a_store_that_is_removed_under_its_writer_is_an_error_and_not_made_anew(tmp_path: Path, part: str) -> None:
    path = tmp_path / "run"
    buffer = opened(path)
    add_each(buffer, [0])
    while (path / part).exists():  # metadata.json may be rewritten meanwhile
        shutil.rmtree(path / part, ignore_errors=True)
    with pytest.raises(errors.StoreWriteError, match=r"was removed (or replaced )?while .* open \(it was .*run\)"):
        buffer.flush()  # raises although nothing is pending
    with pytest.raises(errors.StoreWriteError, match=r"was removed (or replaced )?while") as raised:
        add_each(buffer, [1])
    assert "free space" not in str(raised.value)
    assert not (path / part).exists()
    with pytest.raises(errors.StoreWriteError, match=r"was removed (or replaced )?while"):
        buffer.close()
    assert not (path / part).exists()


def test_a_log_that_somebody_else_has_changed_is_not_continued(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    add_each(buffer, [0])
    (segment,) = (tmp_path / "log").iterdir()
    with segment.open("ab") as file:
        file.write(b"something")
    with pytest.raises(errors.StoreWriteError, match="another process has changed it"):
        add_each(buffer, [1])
    with pytest.raises(errors.StoreWriteError):
        buffer.close()
    assert contents_of(tmp_path) == [0]


# -- readers ------------------------------------------------------------------------------------------


def test_readers_go_on_after_their_process_or_their_directory_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened("r") as buffer:
        add_each(buffer, [0, 1, 2, 3])
    reader = reader_of("r")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_batch(reader.sample(16))
    os.rename(tmp_path / "r", tmp_path / "r2")
    assert [check_trajectory(reader.get(number)) for number in range(4)] == [0, 1, 2, 3]
    for key in (4, 5):  # first read from the log alone, then reopened after the log was merged into the index
        with opened(tmp_path / "r2") as buffer:
            add_each(buffer, [key])
            assert reader.refresh()
    assert [check_trajectory(reader.get(number)) for number in range(6)] == [0, 1, 2, 3, 4, 5]
    reader.close()


def test_a_reader_of_a_replaced_checkpoint_is_told_to_load_again(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with opened(tmp_path / "run", writer=WriterOptions(shard_bytes=1)) as buffer:
        add_each(buffer, [0, 1])
        buffer.save_checkpoint(path)
        reader = reader_of(path)
        assert check_trajectory(reader.get(0)) == 0
        add_each(buffer, [2])
        buffer.save_checkpoint(path)
    with pytest.raises(errors.CorruptStoreError, match=r"removed or replaced while it was open.*load it again"):
        reader.get(1)
    with pytest.raises(errors.StoreNotFoundError, match=r"removed or replaced while it was open.*load it again"):
        reader.refresh()
    reader.load_checkpoint(path)
    assert [check_trajectory(reader.get(number)) for number in range(3)] == [0, 1, 2]


def test_checkpoints_and_stores_behind_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    (tmp_path / "step_1").mkdir()
    (tmp_path / "latest").symlink_to("step_1")
    with opened(tmp_path / "run") as buffer:
        add_each(buffer, [0])
        buffer.save_checkpoint(tmp_path / "latest")
        add_each(buffer, [1])
        buffer.save_checkpoint(tmp_path / "latest")
    assert contents_of(tmp_path / "disk") == contents_of(tmp_path / "step_1") == [0, 1]
    assert os.readlink(tmp_path / "latest") == "step_1"
    assert sorted(os.listdir(tmp_path)) == ["disk", "latest", "run", "step_1"]


# -- the writer's lock ----------------------------------------------------------------------------------


def test_without_its_file_the_lock_is_held_still_and_the_file_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_PATIENCE", 0.0)  # with a holder of unknown kind
    with opened(tmp_path) as buffer:
        add_each(buffer, [0])
        (tmp_path / "writer.lock").unlink()
        with pytest.raises(errors.StoreLockedError):
            opened(tmp_path)
        assert "writer.lock" not in os.listdir(tmp_path)
        add_each(buffer, [1])
        assert "writer.lock was removed while its writer was running" in caplog.text
        with pytest.raises(errors.StoreLockedError, match=f"process {os.getpid()} "):
            opened(tmp_path)
    assert contents_of(tmp_path) == [0, 1]


def test_a_writer_whose_lock_file_was_replaced_stops(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    add_each(buffer, [0])
    (tmp_path / "writer.lock").unlink()
    (tmp_path / "writer.lock").touch()  # a writer that locks only the file would do this
    with pytest.raises(errors.StoreWriteError, match=r"writer\.lock was replaced while this writer held it"):
        buffer.flush()
    with pytest.raises(errors.StoreWriteError, match=r"writer\.lock was replaced"):
        add_each(buffer, [1])
    with pytest.raises(errors.StoreWriteError):
        buffer.close()
    with opened(tmp_path) as again:
        assert [check_trajectory(again.get(number)) for number in again.trajectory_ids.tolist()] == [0]


def test_a_writer_that_locks_the_file_only_keeps_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PATIENCE", 0.0)  # with a holder of unknown kind
    with opened(tmp_path):
        pass
    with (tmp_path / "writer.lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(errors.StoreLockedError):
            opened(tmp_path)
    with opened(tmp_path) as buffer:
        add_each(buffer, [0])
        with (tmp_path / "writer.lock").open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_where_directories_cannot_be_locked_the_file_alone_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def files_only(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")  # NFS reports this for directories
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)
    with opened(tmp_path / "run") as buffer:
        add_each(buffer, [0])
        with pytest.raises(errors.StoreLockedError, match=f"process {os.getpid()} "):
            opened(tmp_path / "run")
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert contents_of(tmp_path / "run") == contents_of(tmp_path / "checkpoint") == [0]


def write_and_fork(path: Path, pipe: Connection) -> None:
    """Open a store for writing in one process and a reader of it in a forked child."""
    buffer = opened(path)
    add_each(buffer, [0])
    reader = reader_of(path)
    child = os.fork()
    if child:
        pipe.send(child)
    signal.pause()
    reader.close()


def test_a_forked_child_that_outlives_its_killed_parent_keeps_no_lock(tmp_path: Path) -> None:
    mine, theirs = multiprocessing.Pipe()
    parent = forking().Process(target=write_and_fork, args=(tmp_path, theirs))
    parent.start()
    theirs.close()
    child = mine.recv()
    try:
        with pytest.raises(errors.StoreLockedError, match=f"process {parent.pid} "):
            opened(tmp_path)
        parent.kill()
        parent.join()
        with opened(tmp_path) as buffer:
            assert LocalDirectory(tmp_path).readers() == []
            add_each(buffer, [1])
        assert contents_of(tmp_path) == [0, 1]
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
