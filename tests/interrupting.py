"""Exceptions between any two instructions of a call, like those of Ctrl-C and signal handlers."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES = (str(ROOT / "trajstore"), str(ROOT / "trainer_hooks"), threading.__file__)


class Interrupt(KeyboardInterrupt):
    """A simulated Ctrl-C, distinct from the user's."""


@cache
def handlers(code: CodeType) -> dict[int, int]:
    """Return each instruction's exception handler by offset; absent if the exception leaves the function."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return {offset: entry.target for entry in entries for offset in range(entry.start, entry.end, 2)}


@cache
def operations(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class Tracer:
    """Raises at the k-th point where Python could deliver a signal within the package in this thread.

    These points are ends of calls, backward jumps, and starts of functions.
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
        # The signal arrives within the call; at a next instruction with another handler it would be too late.
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
        """Return whether the call completed."""
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
