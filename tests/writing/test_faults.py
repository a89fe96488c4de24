"""Every disk call of a session fails in turn: the caller learns of it and no flushed trajectory is lost."""

from __future__ import annotations

import errno
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.stores import add_each, contents_of, keys_at, opened
from tests.support.copies import copy_live, tell_ids
from tests.support.faults import KINDS, FaultPlan, Kind, failing_disk
from tests.support.waiting import wait_until
from tests.support.witness import check_trajectory, witness
from trajstore import Retention, Trajectory, TrajectoryReplayBuffer, WriterOptions, annotate, notes_of
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats import FORMATS
from trajstore.errors import StoreError, StoreWriteError
from trajstore.operations.mending import prune
from trajstore.operations.verify import verify

# A failed deletion is harmless: it is logged and repeated by the next writer.
HOUSEKEEPING = {"unlink", "rmdir"}


FULL = OSError(errno.ENOSPC, "No space left on device", "file")


class Session:
    """A fixed series of calls; a failed call is repeated once on a healed disk."""

    def __init__(self, path: Path, plan: FaultPlan) -> None:
        self.path = path
        self.plan = plan
        self.errors: list[BaseException] = []
        self.keys: dict[int, int] = {}
        self.safe: dict[int, int] = {}
        self.buffer: Any = None

    def attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (StoreError, OSError) as error:
            self.errors.append(error)
            self.plan.heal()
            if self.buffer is not None:
                self.buffer.flush()
            call()

    def open(self) -> None:
        options = WriterOptions(threads=1, commit_interval=0.0)
        self.buffer = opened(self.path, retention=Retention(max_trajectories=6), writer=options)

    def add(self, keys: range) -> None:
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        self.keys |= dict(zip(ids, keys, strict=True))

    def flush(self) -> None:
        self.buffer.flush()
        self.safe = {number: self.keys[number] for number in self.buffer.trajectory_ids.tolist()}

    def evict(self) -> None:
        oldest = int(self.buffer.trajectory_ids[0])
        self.buffer.evict([oldest])
        self.safe.pop(oldest)

    def run(self) -> None:
        self.attempt(self.open)
        for start in (0, 4, 8):
            for key in range(start, start + 4, 2):
                self.attempt(lambda key=key: self.add(range(key, key + 2)))  # type: ignore[misc]
            self.attempt(self.flush)
        self.attempt(self.evict)
        self.attempt(lambda: self.buffer.compact())
        self.attempt(lambda: self.buffer.points.pin("kept"))
        self.attempt(lambda: self.buffer.save_checkpoint(self.path.with_name("checkpoint")))
        self.attempt(lambda: self.add(range(12, 14)))
        self.attempt(self.flush)
        self.attempt(lambda: self.buffer.close())


def session(path: Path, plan: FaultPlan) -> Session:
    done = Session(path / "store", plan)
    with failing_disk(plan):
        done.run()
    return done


def number_of_calls(path: Path) -> int:
    plan = FaultPlan()
    assert not session(path, plan).errors
    return len(plan.calls)


def test_every_sixteenth_call_fails_in_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    total = number_of_calls(tmp_path / "dry")
    assert total > 50
    for number, at in enumerate(range(0, total, 16)):  # the long campaign tests every call
        check_failure(tmp_path, FaultPlan(at, KINDS[number % len(KINDS)], lasting=number % 2 == 0), caplog)


def test_texts_of_lock_and_lease_that_find_no_room_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch("os.pwrite", side_effect=FULL), opened(tmp_path) as buffer:
        add_each(buffer, [0])
        assert "writer.lock could not be written, so other writers cannot name this one" in caplog.text
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            assert len(reader) == 1
            assert caplog.text.count("could not be written for this reader") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_fails_in_every_way(
    tmp_path: Path, kind: Kind, lasting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(number_of_calls(tmp_path / "dry")):
        check_failure(tmp_path, FaultPlan(at, kind, lasting), caplog)


def check_failure(tmp_path: Path, plan: FaultPlan, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    done = session(tmp_path / str(plan.at), plan)
    where = f"call {plan.at} ({plan.fired}: {plan.kind})"
    if plan.fired not in (None, "ftruncate") and plan.kind != "short":  # the text of a lock being released
        reported = done.errors or any(record.levelno >= logging.WARNING for record in caplog.records)
        assert reported, where
        if plan.lasting and plan.fired not in HOUSEKEEPING:  # flush may recover from a single failure by retrying
            assert done.errors, where
    for error in done.errors:
        assert str(tmp_path) in str(error), f"{where}: names no file: {error!r}"
    keys = keys_at(done.path)
    assert keys == done.safe, where
    assert verify(done.path).sound, where
    assert verify(done.path.with_name("checkpoint")).sound, where


def test_what_could_not_be_written_is_kept_and_can_be_sampled(tmp_path: Path) -> None:
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    with opened(tmp_path / "store") as buffer:
        add_each(buffer, [0])
        with failing_disk(plan):
            buffer.add_trajectories([witness(1), witness(2)])
            with pytest.raises(StoreWriteError, match="No space left"):
                buffer.flush()
            with pytest.raises(StoreWriteError):
                buffer.wait([2])
            assert buffer.add_trajectories([witness(3)]) == [3]  # the error was reported and there is room in memory
            assert [check_trajectory(buffer.get(number)) for number in range(4)] == [0, 1, 2, 3]
            assert buffer.get_stats()["committed"] == 0
            assert keys_at(tmp_path / "store") == {0: 0}
            plan.heal()
            buffer.flush()
        add_each(buffer, [4])
    assert keys_at(tmp_path / "store") == {number: number for number in range(5)}


# -- A disk that is full or failing for a while: no flushed trajectory is lost, and writing resumes --


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
    monkeypatch.setattr("trajstore._core.writing.queue._PAUSES", (0.01,))
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    with opened(tmp_path / "store", writer=WriterOptions(commit_interval=0.0)) as buffer, failing_disk(plan):
        buffer.add_trajectories([witness(0)])
        with pytest.raises(StoreWriteError, match=r"No space left.*not on disk: 1 trajectory from id 0 on"):
            buffer.wait([0])
        for key in range(1, 4):  # reported once, then there is room in memory
            buffer.add_trajectories([witness(key)])
        plan.heal()
        wait_until(lambda: buffer.get_stats()["committed"] == 3)
        assert buffer.get_stats()["write_retries"] >= 2
    assert contents_of(tmp_path / "store") == [0, 1, 2, 3]
    assert "Traceback" not in caplog.text


def test_an_add_without_room_does_not_wait_for_a_disk_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore._core.writing.queue._PAUSES", (0.01,))
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    options = WriterOptions(commit_interval=0.0, max_pending_bytes=1)
    with opened(tmp_path / "store", writer=options) as buffer, failing_disk(plan):
        buffer.add_trajectories([witness(0)])
        for _ in range(3):
            with pytest.raises(StoreWriteError, match="No space left"):
                buffer.add_trajectories([witness(1)])
        plan.heal()
    assert contents_of(tmp_path / "store") == [0]


def test_on_a_full_disk_what_is_committed_can_be_evicted(tmp_path: Path) -> None:
    """Only the log can be written to, as on a disk with a few bytes left."""
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
        with pytest.raises(StoreWriteError, match="loses 1 trajectory from id 4 on"):
            buffer.close()
        assert contents_of(tmp_path / "store") == [2, 3]
        with mock.patch("trajstore._core.files.local_locks.os.pwrite", side_effect=FULL):
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
            buffer.flush()  # the files stay within the limit
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
    segment.write_bytes(whole[:-20])  # killed during its last commit
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


def test_values_given_on_a_full_disk_are_not_set(tmp_path: Path) -> None:
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    with opened(tmp_path / "store") as buffer:
        add_each(buffer, range(3))
        with failing_disk(plan):
            with pytest.raises(StoreWriteError, match=r"No space left.*free space and annotate\(\) again"):
                annotate(buffer, [0, 1], {"judge": 0.25})
            with pytest.raises(StoreWriteError, match=r"nothing was given to the trajectories"):
                annotate(buffer, [2], {"rows": [torch.zeros(6, 1)]})
            with pytest.raises(StoreWriteError, match=r"free space and evict\(\) again"):
                buffer.evict([1])
            plan.heal()
            buffer.evict([1])
            annotate(buffer, [0], {"judge": 0.5})
    assert [note.value for note in notes_of(tmp_path / "store", 0)] == [0.5]
    assert verify(tmp_path / "store").sound


def test_a_prune_that_a_full_disk_ends_says_what_it_has_evicted(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    seen, at, fired = set(), 0, True
    while fired:
        path = tmp_path / str(at)
        with opened(path) as buffer:
            add_each(buffer, range(3))
            buffer.points.save(1)
        plan, text = FaultPlan(at, "ENOSPC", lasting=True), None
        with failing_disk(plan):
            try:
                prune(path, "trajectory_id < 1")
            except OSError as error:
                text = str(error)
        if text is not None and "was not committed" not in text:  # else the record may count, or not
            seen.add((*contents_of(path), "before that, 1 trajectory was evicted, kept on disk by step-1.0" in text))
        at, fired = at + 1, plan.fired is not None
    assert seen == {(0, 1, 2, False), (1, 2, True)}


def test_a_prune_of_several_ranks_that_fails_in_the_second_says_what_it_has_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("polars")
    for rank in range(2):
        with opened(tmp_path / f"rank_{rank}") as buffer:
            add_each(buffer, range(3))
    append = LocalDirectory.append

    def failing(directory: LocalDirectory, name: str, data: bytes) -> None:
        if directory.url.endswith("rank_1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(directory, name, data)

    done = "before that, 1 trajectory was evicted, of 3; prune again to evict the rest"
    with monkeypatch.context() as patch:
        patch.setattr(LocalDirectory, "append", failing)
        with pytest.raises(StoreWriteError, match=f"No space left.*{done}"):
            prune(tmp_path, "trajectory_id in ('0/0', '1/0', '1/1')")
    assert [len(contents_of(tmp_path / f"rank_{rank}")) for rank in range(2)] == [2, 3]
    assert prune(tmp_path, "trajectory_id in ('0/0', '1/0', '1/1')").trajectories == 2
