"""Background threads: in order, bounded, errors raised once, safe to interrupt and to fork."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from tests.interrupting import Tracer, within
from trajstore._core.base.background import Background


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("test", 10)
    yield made
    made.close()


def _wait(gate: threading.Event) -> None:
    assert gate.wait(600)


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
    assert failed.wait(600)
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
        within(600, partial(background.submit, partial(ran.append, 77), 1))
        within(600, background.close)
        assert ran[-1] == 77
        assert ran[:-1] in (submitted, list(range(len(submitted) + 1)))
