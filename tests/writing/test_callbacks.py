"""``on_commit``: what a function of the user's may do there, and that nothing waits for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.stores import add_each, contents_of, opened
from trajstore import TrajectoryReplayBuffer
from trajstore.testing.witness import witness


def test_on_commit_may_call_the_buffer(tmp_path: Path) -> None:
    told: list[int] = []
    done = threading.Event()

    def on_commit(ids: Sequence[int]) -> None:
        assert threading.current_thread().name == "trajstore-on-commit"
        told.extend(ids)
        if 0 in ids:
            buffer.evict([0])
            add_each(buffer, [5])
            buffer.sample(2)
            buffer.save_checkpoint(tmp_path / "checkpoint")
        if 3 in ids:
            done.set()

    with opened(tmp_path / "store", on_commit=on_commit) as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        assert done.wait(60)
    assert told == [0, 1, 2, 3]
    assert contents_of(tmp_path / "store") == [1, 2, 5]
    assert contents_of(tmp_path / "checkpoint") == [1, 2, 5]


def test_flush_does_not_wait_for_a_callback_that_waits_for_the_caller(tmp_path: Path) -> None:
    mine = threading.Lock()
    told: list[int] = []

    def on_commit(ids: Sequence[int]) -> None:
        with mine:
            told.extend(ids)

    with opened(tmp_path / "store", on_commit=on_commit) as buffer, mine:
        add_each(buffer, [0])
        assert told == []
    assert told == [0]


def test_a_callback_may_close_the_buffer_and_does_not_keep_it_alive(tmp_path: Path) -> None:
    closed = threading.Event()

    def on_commit(ids: Sequence[int]) -> None:
        buffer.close()
        closed.set()

    buffer = opened(tmp_path / "store", on_commit=on_commit)
    buffer.add_trajectories([witness(0)])
    assert closed.wait(60)
    assert contents_of(tmp_path / "store") == [0]

    class Holder:
        buffer: TrajectoryReplayBuffer

        def on_commit(self, ids: Sequence[int]) -> None:
            pass

    holder = Holder()
    holder.buffer = opened(tmp_path / "other", on_commit=holder.on_commit)
    del holder
    gc.collect()
    with opened(tmp_path / "other"):  # the lock is free
        pass
