"""Ctrl-C between any two instructions of a call: the store flushes and closes, and holds what it said."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore.testing.witness import check_batch, check_trajectory, witness
from trajstore.verify import verify

PACKAGE = str(Path(__file__).resolve().parent.parent / "trajstore")
FILES = (PACKAGE, threading.__file__)


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, told apart from the user's own."""


@cache
def handlers(code: CodeType) -> dict[int, int]:
    """Return, by offset, where an exception of an instruction is handled; absent if it leaves the function."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return {offset: entry.target for entry in entries for offset in range(entry.start, entry.end, 2)}


@cache
def operations(code: CodeType) -> dict[int, str]:
    return {found.offset: found.opname for found in dis.get_instructions(code)}


class Tracer:
    """Raises at the k-th moment at which Python could deliver a signal while this thread is within the package.

    That is at the end of a call, at a backward jump, and when a function begins.
    """

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.count = 0
        self._last: dict[FrameType, int] = {}

    def _due(self, frame: FrameType) -> bool:
        last, now = self._last.get(frame), frame.f_lasti
        self._last[frame] = now
        if last is None:
            return False
        if not operations(frame.f_code).get(last, "").startswith(("CALL", "JUMP_BACKWARD", "RESUME")):
            return False
        # The signal comes within the call; where the next instruction is handled elsewhere it would come too late.
        return handlers(frame.f_code).get(last) == handlers(frame.f_code).get(now)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "return":
            self._last.pop(frame, None)
        if event == "opcode" and self._due(frame):
            self.count += 1
            if self.count - 1 == self.at:
                sys.settrace(None)
                raise Interrupt
        return self

    def run(self, call: Callable[[], Any]) -> bool:
        """Return whether the call came to its end."""
        old = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except Interrupt:
            return False
        finally:
            sys.settrace(old)
            self._last.clear()
        return True


def opened(path: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        seed=1,
        auto_save=True,
        auto_save_path=path,
        sample_window_size=0,
        cache_size=1,
        writer=WriterOptions(commit_interval=0.0, max_pending_bytes=1 << 20),
    )


def within(seconds: float, call: Callable[[], Any]) -> None:
    """Fail if a call does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def check(path: Path, buffer: TrajectoryReplayBuffer, added: dict[int, int]) -> None:
    """The buffer still works, and what was added before and after the interrupt is on disk."""
    ids: list[int] = []
    within(20, lambda: ids.extend(buffer.add_trajectories([witness(77)])))
    within(20, buffer.flush)
    assert buffer.get_stats()["pending_bytes"] == 0
    assert buffer.committed >= ids[0]
    within(20, lambda: check_batch(buffer.sample(4)))
    shown = buffer.trajectory_ids.tolist()
    assert len(set(shown)) == len(shown)
    within(20, buffer.close)
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(path)
        assert reader.trajectory_ids.tolist() == shown
        found = {number: check_trajectory(reader.get(number)) for number in shown}
    assert {**added, ids[0]: 77}.items() <= found.items()
    assert set(found) - {*added, *ids} <= {len(added), len(added) + 1}  # of the interrupted call, whole or not at all
    assert verify(path).sound


CALLS: dict[str, Callable[[TrajectoryReplayBuffer], Any]] = {
    "add": lambda buffer: buffer.add_trajectories([witness(50), witness(51)]),
    "flush": lambda buffer: buffer.flush(),
    "sample": lambda buffer: buffer.sample(3),
    "evict": lambda buffer: buffer.evict([0]),
    "close": lambda buffer: buffer.close(),
}


def instructions(path: Path, name: str) -> int:
    """Return how many instructions a call takes."""
    tracer = Tracer(None)
    with opened(path) as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        assert tracer.run(lambda: CALLS[name](buffer))
    return tracer.count


def interrupted_at(path: Path, name: str, at: int) -> None:
    buffer = opened(path)
    added = dict(zip(buffer.add_trajectories([witness(key) for key in range(3)]), range(3), strict=True))
    buffer.flush()
    ended = Tracer(at).run(lambda: CALLS[name](buffer))
    if name == "close":
        within(20, buffer.close)
        assert verify(path).sound
        return
    if name == "evict":
        within(20, buffer.flush)
        if ended or 0 not in buffer.trajectory_ids.tolist():
            del added[0]
        else:
            within(20, lambda: buffer.evict([0]))
            del added[0]
        added = {number: key for number, key in added.items() if number}
        ids: list[int] = []
        within(20, lambda: ids.extend(buffer.add_trajectories([witness(9)])))
        within(20, buffer.close)
        with opened(path) as again:
            assert again.trajectory_ids.tolist() == [1, 2, *ids]
        return
    check(path, buffer, added)


@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_at_any_instruction(tmp_path: Path, name: str) -> None:
    total = instructions(tmp_path / "count", name)
    step = max(1, total // 12)  # all of them in the long campaign
    for at in range(0, total, step):
        interrupted_at(tmp_path / str(at), name, at)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_at_every_instruction(tmp_path: Path, name: str) -> None:
    for at in range(instructions(tmp_path / "count", name)):
        interrupted_at(tmp_path / str(at), name, at)
