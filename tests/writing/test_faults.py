"""Every call to the disk in a session fails in turn: the caller learns of it and nothing flushed is lost."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stores import add_each, keys_at, opened
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions
from trajstore.errors import StoreError, StoreWriteError
from trajstore.inspection.verify import verify
from trajstore.testing.faults import KINDS, FaultPlan, Kind, failing_disk
from trajstore.testing.witness import check_trajectory, witness

# What cannot be deleted is only in the way: it is told in the log and tried again by the next writer.
HOUSEKEEPING = {"unlink", "rmdir"}


class Session:
    """A fixed run of calls. Each is tried once; if that fails, the disk is healed and it is tried again."""

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


def test_every_fourth_call_fails_in_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    total = number_of_calls(tmp_path / "dry")
    assert total > 50
    for at in range(0, total, 4):  # all of them in the long campaign
        check_failure(tmp_path, FaultPlan(at, KINDS[at // 4 % len(KINDS)], lasting=at % 8 == 0), caplog)


def test_texts_of_lock_and_lease_that_find_no_room_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with opened(tmp_path) as buffer:
        add_each(buffer, [0])
        assert "writer.lock cannot say who writes here" in caplog.text
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            assert len(reader) == 1
            assert caplog.text.count("cannot say what is read here") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
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
    if plan.fired not in (None, "ftruncate") and plan.kind != "short":  # the text of a lock that is given back
        told = done.errors or any(record.levelno >= logging.WARNING for record in caplog.records)
        assert told, where
        if plan.lasting and plan.fired not in HOUSEKEEPING:  # a single failure may be overcome by flush trying again
            assert done.errors, where
    for error in done.errors:
        assert str(tmp_path) in str(error), f"{where}: names no file: {error!r}"
    found = keys_at(done.path)
    assert found == done.safe, where
    assert verify(done.path).sound, where
    assert verify(done.path.with_name("checkpoint")).sound, where


def test_what_could_not_be_written_is_kept_and_can_be_sampled(tmp_path: Path) -> None:
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    plan_later = FaultPlan()
    with opened(tmp_path / "store") as buffer:
        add_each(buffer, [0])
        with failing_disk(plan):
            buffer.add_trajectories([witness(1), witness(2)])
            with pytest.raises(StoreWriteError, match="No space left"):
                buffer.flush()
            with pytest.raises(StoreWriteError):
                buffer.wait([2])
            assert buffer.add_trajectories([witness(3)]) == [3]  # the error was told; there is room in memory
            assert [check_trajectory(buffer.get(number)) for number in range(4)] == [0, 1, 2, 3]
            assert buffer.points.committed == 0
            assert keys_at(tmp_path / "store") == {0: 0}
            plan.heal()
            buffer.flush()
        with failing_disk(plan_later):
            add_each(buffer, [4])
    assert plan_later.fired is None
    assert keys_at(tmp_path / "store") == {number: number for number in range(5)}
