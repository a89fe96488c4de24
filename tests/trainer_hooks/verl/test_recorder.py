"""Background recording of rollouts: nothing is lost, and failures reach the caller."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.interrupting import Tracer, within
from tests.trainer_hooks.verl.builders import fresh_row, rated
from trainer_hooks.verl.config import OnError, OutcomeRule
from trainer_hooks.verl.reading import RunTokenizer, Scribe
from trainer_hooks.verl.recorder import RolloutRecorder
from trainer_hooks.verl.rows import trajectories_of
from trajstore import TrajectoryReplayBuffer
from trajstore.core.base.background import Background
from trajstore.errors import InvalidTrajectoryError, StoreClosedError, StoreWriteError
from trajstore.testing.faults import FaultPlan, failing_disk
from trajstore.trajectory import AgentTrajectory


class Words:
    """A tokenizer that optionally waits for a gate."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate

    def __deepcopy__(self, memo: Any) -> Words:
        return self

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        if self._gate is not None:
            assert self._gate.wait(60)
        return ["".join(map(chr, row_ids)) for row_ids in ids]


def made(uid: str, count: int) -> list[AgentTrajectory]:
    rows = [rated(fresh_row(uid, number, seed=number)) for number in range(count)]
    return trajectories_of(rows, OutcomeRule(), step=1, run="run-a", fingerprint="f1")


def recorder(path: Path, on_error: OnError = "raise", gate: threading.Event | None = None) -> RolloutRecorder:
    return RolloutRecorder(str(path), "pt", None, on_error, Scribe(RunTokenizer("f1", decoder=Words(gate)), text=True))


def on_disk(path: Path) -> list[AgentTrajectory]:
    with TrajectoryReplayBuffer.open(path) as buffer:
        rollouts = [buffer.get(number) for number in buffer.trajectory_ids.tolist()]
    return [rollout for rollout in rollouts if isinstance(rollout, AgentTrajectory)]


def test_a_step_waits_neither_for_text_nor_for_the_disk_and_a_flush_for_both(tmp_path: Path) -> None:
    gate = threading.Event()
    recording = recorder(tmp_path, gate=gate)
    first, second = made("a", 100), made("b", 100)
    assert recording.record(first)["recording/waiting"] == 100
    assert recording.record(second)["recording/waiting"] == 200
    assert recording.buffer.points.committed == -1, "nothing is acknowledged before it has its text"
    gate.set()
    recording.flush()
    assert recording.buffer.points.committed == 199
    assert recording.record([])["recording/waiting"] == 0
    stored = on_disk(tmp_path)
    recording.close()
    assert [rollout.rollout_id for rollout in stored] == [rollout.rollout_id for rollout in [*first, *second]]
    assert {len(rollout.messages) for rollout in stored} == {4}
    assert {len(rollout.messages) for rollout in first} == {1}, "the trainer goes on with its own"


def test_closing_writes_everything(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    recording.record(made("a", 100))
    assert not recording.closed
    recording.close()
    recording.close()
    assert recording.closed
    assert len(on_disk(tmp_path)) == 100
    with pytest.raises(StoreClosedError):
        recording.record(made("b", 1))


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_rollout_that_cannot_be_stored_costs_those_beside_it_nothing(
    on_error: OnError, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several = made("a", 100)
    several[70].metadata["odd"] = float("nan")
    recording = recorder(tmp_path, on_error)
    recording.record(several)
    if on_error == "raise":
        with pytest.raises(InvalidTrajectoryError, match="odd"):
            recording.flush()
    recording.flush()
    assert recording.record([])["recording/lost"] == 1
    assert recording.record([])["recording/waiting"] == 0
    recording.close()
    assert len(on_disk(tmp_path)) == 99
    assert ("rollouts are not recorded" in caplog.text) == (on_error == "warn")


def test_a_full_disk_is_told_to_the_next_who_records_or_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.core.writing.queue._PAUSES", (0.01,))
    recording = recorder(tmp_path)
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    with failing_disk(plan):
        recording.record(made("a", 3))
        with pytest.raises(StoreWriteError, match="No space left"):
            recording.flush()
        plan.heal()
    recording.record(made("b", 3))
    recording.close()
    assert len(on_disk(tmp_path)) == 6


def _child(recording: RolloutRecorder, pipe: Any) -> None:
    pipe.send(recording.closed)
    try:
        recording.record(made("b", 1))
    except StoreClosedError as error:
        pipe.send(f"{error}")


def test_a_forked_child_records_nothing_and_ends(tmp_path: Path) -> None:
    """Data loader workers are such children, and interpreter exit waits for pending writes."""
    gate = threading.Event()
    recording = recorder(tmp_path, gate=gate)
    recording.record(made("a", 3))
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_child, args=(recording, theirs))
    child.start()
    assert ours.recv() is True
    assert "belongs to the parent process" in ours.recv()
    child.join(60)
    assert child.exitcode == 0
    gate.set()
    recording.close()
    assert len(on_disk(tmp_path)) == 3


def test_an_interpreter_that_ends_writes_what_waits(tmp_path: Path, project_root: Path) -> None:
    program = f"""
import time
import torch
from trainer_hooks.verl.reading import RunTokenizer, Scribe
from trainer_hooks.verl.recorder import RolloutRecorder
from trajstore import AgentTrajectory

class Slow:
    def batch_decode(self, ids, skip_special_tokens):
        time.sleep(0.3)
        return ["text"] * len(ids)

scribe = Scribe(RunTokenizer("f1", decoder=Slow()), text=True)
recording = RolloutRecorder({str(tmp_path)!r}, "pt", None, "raise", scribe)
ids = torch.arange(5)
recording.record([AgentTrajectory(input_ids=ids, response_start=2, response_mask=ids[2:] > 0) for _ in range(200)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project_root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    stored = on_disk(tmp_path)
    assert len(stored) == 200
    assert {len(rollout.messages) for rollout in stored} == {1}


def test_who_interrupts_closing_is_told_what_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    recording = recorder(tmp_path, gate=gate)
    recording.record(made("a", 100))

    def interrupted(timeout: float | None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(recording._background, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recording.close()
    assert "interrupted: 100 rollouts had no text yet, and are not recorded" in caplog.text
    gate.set()
    assert on_disk(tmp_path) == []


# -- Background work: in order, bounded, errors raised once, safe to interrupt and to fork --


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("test", 10)
    yield made
    made.close()


def _wait(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_calls_run_one_after_the_other_in_order(background: Background) -> None:
    ran: list[int] = []
    threads: set[str] = set()

    def call(number: int) -> None:
        ran.append(number)
        threads.add(threading.current_thread().name)

    for number in range(200):
        background.submit(partial(call, number), 1)
    background.wait()
    assert ran == list(range(200))
    assert threads == {"test"}


def test_who_submits_waits_for_room(background: Background) -> None:
    gate = threading.Event()
    background.submit(lambda: _wait(gate), 4)
    background.submit(lambda: None, 6)
    submitted = threading.Event()

    def submit() -> None:
        background.submit(lambda: None, 1)
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not submitted.wait(0.2), "more waits than may"
    gate.set()
    thread.join()
    background.submit(lambda: None, 1000)  # heavier than the limit: runs alone
    background.wait()


def test_an_error_is_told_once_and_nothing_behind_it_is_lost(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def fail(number: int) -> None:
        raise OSError(f"disk {number}")

    background.submit(partial(fail, 1), 1)
    background.submit(partial(fail, 2), 1)
    background.submit(partial(ran.append, 3), 1)
    with pytest.raises(OSError, match="disk 1"):
        background.wait()
    assert ran == [3]
    assert "disk 2" in caplog.text
    failed = threading.Event()
    background.submit(partial(fail, 4), 1)
    background.submit(failed.set, 1)
    assert failed.wait(60)
    with pytest.raises(OSError, match="disk 4"):
        background.submit(partial(ran.append, 5), 1)
    background.wait()
    assert ran == [3, 5], "callables submitted when the error was raised still run"


@pytest.mark.locks_unchecked("an exception may come within the check itself, which is code in Python")
def test_an_interrupt_at_any_instruction_leaves_each_call_whole_or_out() -> None:
    def use(background: Background, ran: list[int], submitted: list[int]) -> None:
        for number in range(3):
            background.submit(partial(ran.append, number), 2)  # two fit: the third waits for the first
            submitted.append(number)
        background.wait()

    tracer = Tracer(None)
    counted = Background("test", 4)
    tracer.run(partial(use, counted, [], []))
    counted.close()
    assert tracer.count > 50
    for at in range(0, tracer.count, 2):
        background, ran, submitted = Background("test", 4), [], []  # type: ignore[var-annotated]
        Tracer(at).run(partial(use, background, ran, submitted))
        within(60, partial(background.submit, partial(ran.append, 77), 1))
        within(60, background.close)
        assert ran[-1] == 77
        assert ran[:-1] in (submitted, list(range(len(submitted) + 1)))
