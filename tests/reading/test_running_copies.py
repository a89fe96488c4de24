"""What is let go of stays until no copy is running, and its slot is free only then."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tests.interrupting import Tracer
from trajstore.reading.running_copies import RunningCopies


class Owner:
    """Holds rows, or stands for a copy of them."""


def begun(copies: RunningCopies) -> Owner:
    copy = Owner()
    copies.begin(copy)
    return copy


def test_without_a_copy_it_goes_at_once() -> None:
    free: list[int] = []
    copies = RunningCopies(free.extend)
    owner = Owner()
    gone = weakref.ref(owner)
    copies.let_go(owner, 3)
    copies.let_go(None, None)
    del owner
    assert gone() is None
    assert free == [3]
    assert copies.idle


def test_it_waits_for_all_copies() -> None:
    free: list[int] = []
    copies = RunningCopies(free.extend)
    one, other = begun(copies), begun(copies)
    owner = Owner()
    gone = weakref.ref(owner)
    copies.let_go(owner, 3)
    copies.let_go(None, 4)
    copies.let_go(None, None)
    del owner
    copies.end(one)
    copies.end(one)
    assert gone() is not None
    assert free == []
    assert not copies.idle
    copies.end(other)
    assert gone() is None
    assert free == [3, 4]
    assert copies.idle


def test_a_copy_that_was_dropped_keeps_nothing_once_another_one_ends() -> None:
    free: list[int] = []
    copies = RunningCopies(free.extend)
    dropped = begun(copies)
    copies.let_go(None, 1)
    del dropped
    gc.collect()
    assert free == []
    copies.end(begun(copies))
    assert free == [1]


def test_nothing_is_destroyed_under_the_lock() -> None:
    copies = RunningCopies(lambda slots: None)
    seen: list[bool] = []

    class Late:
        def __del__(self) -> None:
            seen.append(copies.idle)  # takes the lock

    copy = begun(copies)
    copies.let_go(Late(), None)
    thread = threading.Thread(target=copies.end, args=(copy,), daemon=True)
    thread.start()
    del copy
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [True]


@pytest.mark.locks_unchecked
def test_after_an_interrupt_a_number_is_free_once_at_most_and_the_lock_is() -> None:
    def ended(at: int | None) -> tuple[list[int], int]:
        free: list[int] = []
        copies = RunningCopies(free.extend)
        copy = begun(copies)
        copies.let_go(None, 1)
        copies.let_go(None, 2)
        tracer = Tracer(at)
        tracer.run(lambda: copies.end(copy))
        copies.end(begun(copies))
        assert copies.idle
        return free, tracer.count

    _, count = ended(None)
    for at in range(count):
        free, _ = ended(at)
        assert len(free) == len(set(free))


def test_in_a_forked_child_no_copy_runs() -> None:
    free: list[int] = []
    copies = RunningCopies(free.extend)
    copy = begun(copies)  # of a thread that the child does not have
    copies.let_go(None, 1)
    copies.stop()
    copies.go_on(in_child=True)
    copies.end(begun(copies))
    assert free == [1]
    copies.end(copy)
    assert copies.idle
