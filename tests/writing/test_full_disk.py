"""A disk that is full, or fails, for a while: nothing flushed is lost, and writing goes on when there is space."""

from __future__ import annotations

import errno
import logging
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.stores import add_each, contents_of, opened
from trajstore import Trajectory, WriterOptions
from trajstore.errors import StoreWriteError
from trajstore.files.local import LocalDirectory
from trajstore.formats import FORMATS
from trajstore.inspection.verify import verify
from trajstore.testing.copies import copy_live, tell_ids
from trajstore.testing.faults import FaultPlan, failing_disk
from trajstore.testing.waiting import wait_until
from trajstore.testing.witness import witness


def test_a_write_error_that_another_attempt_overcomes_is_a_warning_and_a_figure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=0.0)) as buffer:
        with failing_disk(FaultPlan(0, "EIO")):
            buffer.add_trajectories([witness(0)])
            buffer.wait([0])
        buffer.flush()
        assert buffer.get_stats()["write_retries"] == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING]
    assert "Traceback" not in caplog.text


def test_the_queue_recovers_without_a_flush_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trajstore.writing.queue._PAUSES", (0.01,))
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=0.0)) as buffer, failing_disk(plan):
        buffer.add_trajectories([witness(0)])
        with pytest.raises(StoreWriteError, match=r"No space left.*1 trajectories from id 0 on are not on disk"):
            buffer.wait([0])
        for key in range(1, 4):  # told once; then there is room in memory
            buffer.add_trajectories([witness(key)])
        plan.heal()
        wait_until(lambda: buffer.points.committed == 3)
        assert buffer.get_stats()["write_retries"] >= 2
    assert contents_of(tmp_path / "store") == [0, 1, 2, 3]
    assert "Traceback" not in caplog.text


def test_an_add_without_room_does_not_wait_for_a_disk_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.writing.queue._PAUSES", (0.01,))
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    options = WriterOptions(commit_interval=0.0, max_pending_bytes=1)
    with opened(tmp_path / "store", writer=options) as buffer, failing_disk(plan):
        buffer.add_trajectories([witness(0)])
        for _ in range(3):
            with pytest.raises(StoreWriteError, match="No space left"):
                buffer.add_trajectories([witness(1)])
        plan.heal()
    assert contents_of(tmp_path / "store") == [0]


def test_closing_on_a_full_disk_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = opened(tmp_path / "store")
    with failing_disk(FaultPlan(0, "ENOSPC", lasting=True)):
        buffer.add_trajectories([witness(key) for key in range(4)])
        with pytest.raises(StoreWriteError, match=r"No space left.*4 trajectories from id 0 on are lost"):
            buffer.close()
    assert "Traceback" not in caplog.text


FULL = OSError(errno.ENOSPC, "No space left on device", "file")


def test_on_a_full_disk_what_is_committed_can_be_evicted(tmp_path: Path) -> None:
    """Nothing but the log can be written to, as on a disk that has a few bytes left."""
    buffer = opened(tmp_path / "store", writer=WriterOptions(commit_interval=0.0))
    buffer.add_trajectories([witness(key) for key in range(4)])
    buffer.flush()
    with mock.patch.object(LocalDirectory, "publish", side_effect=FULL):
        buffer.add_trajectories([witness(4)])
        with pytest.raises(StoreWriteError, match="No space left"):
            buffer.flush()
        buffer.evict([0])
        with pytest.raises(StoreWriteError, match="No space left"):
            buffer.evict([1, 4])
        assert buffer.trajectory_ids.tolist() == [2, 3, 4]
        with pytest.raises(StoreWriteError, match="1 trajectories from id 4 on are lost"):
            buffer.close()
        assert contents_of(tmp_path / "store") == [2, 3]
        with mock.patch("trajstore.files.local_locks.os.pwrite", side_effect=FULL):
            buffer = opened(tmp_path / "store", writer=WriterOptions(commit_interval=0.0))
        assert buffer.trajectory_ids.tolist() == [2, 3]
        buffer.evict([2])
    assert buffer.add_trajectories([witness(5)]) == [4]
    buffer.close()
    assert contents_of(tmp_path / "store") == [3, 5]
    assert verify(tmp_path / "store").sound


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_limit_on_the_size_of_files_is_the_systems_fault_and_not_a_trajectorys(tmp_path: Path, form: str) -> None:
    block = Trajectory(rewards=torch.zeros(64, 64, 4))  # 64 KiB
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path / "store", trajectory_format=form, writer=WriterOptions(commit_interval=60)) as buffer:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            buffer.add_trajectories([block] * 5)
            buffer.flush()  # in files that the limit allows
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
            buffer.add_trajectories([block] * 5)
            with pytest.raises(StoreWriteError, match="File too large"):
                buffer.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        buffer.flush()
    result = verify(tmp_path / "store")
    assert result.sound
    assert result.trajectories == 10


def test_a_full_disk_with_a_torn_log_can_be_opened_and_evicted_from(tmp_path: Path) -> None:
    with opened(tmp_path / "live") as buffer:
        add_each(buffer, range(4))
        store = copy_live(tmp_path / "live", tmp_path / "killed")
    (segment,) = (store / "log").iterdir()
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-20])  # killed in its last commit
    tell_ids(store, 0)
    with mock.patch.object(LocalDirectory, "publish", side_effect=FULL):
        buffer = opened(store)
        assert buffer.trajectory_ids.tolist() == [0, 1, 2]
        buffer.evict([1])
        with pytest.raises(StoreWriteError, match="No space left"):
            buffer.close()
    assert segment.read_bytes().startswith(whole[: whole[:-1].rindex(b"\n") + 1])
    assert contents_of(store) == [0, 2]
    with opened(store) as buffer:
        assert buffer.add_trajectories([witness(9)]) == [3]
    assert contents_of(store) == [0, 2, 9]
    assert verify(store).sound
