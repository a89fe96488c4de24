"""Ctrl-C between any two instructions of a call: the store can flush and close, and keeps its contents."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests import stores
from tests.interrupting import Tracer, within
from tests.stores import keys_at
from tests.support.waiting import wait_until
from tests.support.witness import check_batch, witness
from trajstore import Reader, TrajectoryReplayBuffer, WriterOptions, annotate, errors
from trajstore._core.base.interrupts import CHANGE_THREAD, uninterrupted
from trajstore._core.buffer.sink import StoreSink
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.row_location import STARTS
from trajstore.operations.verify import verify

pytestmark = pytest.mark.locks_unchecked("an exception may come within the check itself, which is code in Python")


def opened(path: Path) -> TrajectoryReplayBuffer:
    options = WriterOptions(commit_interval=0.0, max_pending_bytes=1 << 20)
    return stores.opened(path, seed=1, cache_size=1, writer=options)


def check(path: Path, buffer: TrajectoryReplayBuffer, added: dict[int, int]) -> None:
    """The buffer still works, and additions from before and after the interrupt are on disk."""
    ids: list[int] = []
    within(600, lambda: ids.extend(buffer.add_trajectories([witness(77)])))
    within(600, buffer.flush)
    assert buffer.get_stats()["pending_bytes"] == 0
    assert buffer.get_stats()["committed"] >= ids[0]
    within(600, lambda: check_batch(buffer.sample(4)))
    shown = buffer.trajectory_ids.tolist()
    assert len(set(shown)) == len(shown)
    within(600, buffer.close)
    keys = keys_at(path)
    assert list(keys) == shown
    assert {**added, ids[0]: 77}.items() <= keys.items()
    assert set(keys) - {*added, *ids} <= {len(added), len(added) + 1}  # the interrupted call's, all or none
    assert verify(path).sound


CALLS: dict[str, Callable[[TrajectoryReplayBuffer], Any]] = {
    "add": lambda buffer: buffer.add_trajectories([witness(50), witness(51)]),
    "flush": lambda buffer: buffer.flush(),
    "sample": lambda buffer: buffer.sample(3),
    "evict": lambda buffer: buffer.evict([0]),
    "close": lambda buffer: buffer.close(),
}


def instructions(path: Path, name: str) -> int:
    """Return the number of instructions of a call."""
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
        within(600, buffer.close)
        assert verify(path).sound
        return
    if name == "evict":
        within(600, buffer.flush)
        if not ended:
            with suppress(errors.TrajectoryUnavailableError):  # the eviction was completed after the interrupt
                within(600, lambda: buffer.evict([0]))
        ids: list[int] = []
        within(600, lambda: ids.extend(buffer.add_trajectories([witness(9)])))
        within(600, buffer.close)
        with opened(path) as again:
            assert again.trajectory_ids.tolist() == [1, 2, *ids]
        return
    check(path, buffer, added)


EVERY = pytest.param(None, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("moments", [6, EVERY])
def test_an_interrupt_at_any_instruction(tmp_path: Path, name: str, moments: int | None) -> None:
    total = instructions(tmp_path / "count", name)
    assert total > 0, "there is nothing to interrupt"
    for at in range(0, total, max(1, total // (moments or total))):
        interrupted_at(tmp_path / str(at), name, at)


@pytest.mark.parametrize("moments", [12, EVERY])
def test_a_refresh_of_a_run_that_is_interrupted_leaves_rows_whole_and_is_made_up_for(
    tmp_path: Path, moments: int | None
) -> None:
    def refreshed(run: Path, at: int | None) -> int:
        """Return the number of instructions of a refresh, which ends at one of them."""
        writers = [opened(run / f"rank_{rank}") for rank in range(2)]
        for rank, writer in enumerate(writers):
            stores.add_each(writer, range(3 * rank, 3 * rank + 3))
        with Reader.open(run) as reader:
            before = set(stores.keys_of(reader))
            writers[0].evict([1])
            annotate(writers[1], 1, {"score": 1})
            with patch("trajstore._core.writing.commit_log.microseconds", lambda: 5):  # comes before others of rank 1
                stores.add_each(writers[0], [6])
            tracer = Tracer(at)
            tracer.run(reader.refresh)
            seen = set(stores.keys_of(reader))
            within(600, lambda: check_batch(reader.sample(8)))
            reader.refresh()
            with Reader.open(run) as fresh:
                assert reader.trajectory_ids.tolist() == fresh.trajectory_ids.tolist()
                assert seen <= before | set(fresh.trajectory_ids.tolist())
                assert reader.query().rows() == fresh.query().rows()
                stores.keys_of(reader)
        for writer in writers:
            writer.close()
        return tracer.count

    total = refreshed(tmp_path / "count", None)
    for at in range(0, total, max(1, total // (moments or total))):
        refreshed(tmp_path / str(at), at)


def test_the_rewriter_hears_of_news_after_an_interrupt_at_every_instruction_of_them(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        assert isinstance(buffer._sink, StoreSink)
        rewriter = buffer._sink.writer.rewriter
        tracer = Tracer(None)
        tracer.run(rewriter.note)
        for at in range(tracer.count):
            assert not Tracer(at).run(rewriter.note)
            within(600, rewriter.note)


def test_a_thread_whose_start_is_interrupted_begins_and_ends_or_never_was() -> None:
    called: list[None] = []
    tracer = Tracer(None)
    tracer.run(lambda: uninterrupted(lambda: called.append(None)))
    for at in range(tracer.count):
        Tracer(at).run(lambda: uninterrupted(lambda: called.append(None)))
    begun = [thread for thread in threading.enumerate() if thread.name == CHANGE_THREAD]
    wait_until(lambda: not any(thread.is_alive() for thread in begun))  # not joined: one may not have begun yet
    assert 1 <= len(called) <= tracer.count + 1, "the uninterrupted call, and at most one call each time after it"
    assert called


def test_a_sample_that_was_interrupted_keeps_no_memory(tmp_path: Path) -> None:
    total = instructions(tmp_path / "count", "sample")
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        for at in range(0, total, max(1, total // 30)):
            Tracer(at).run(lambda: buffer.sample(3))
        gc.collect()
        buffer.sample(3)
        assert buffer._live.contents.addresses.copies.idle


def test_a_move_that_was_interrupted_leaves_entries_whole() -> None:
    """As in ``refresh()`` after a rewrite: an entry refers to the old shard or to the new one."""
    names = ("shard", *STARTS)
    moved = np.stack([np.full(3, 7), *(np.arange(40, 43) for _ in STARTS)], axis=1)

    def entries(index: TrajectoryIndex) -> list[list[int]]:
        return np.stack([index[name] for name in names], axis=1).tolist()

    def index_of_three() -> TrajectoryIndex:
        index = TrajectoryIndex()
        index.append({name: np.arange(3).astype(dtype) for name, dtype in COLUMNS.items()})
        return index

    index_of_three().point(np.arange(3), moved)  # loads the kernel in advance
    done = index_of_three()
    old = entries(done)
    tracer = Tracer(-1)
    assert tracer.run(lambda: done.point(np.arange(3), moved))
    new = entries(done)
    assert new == [[7, 40 + i, 40 + i, 40 + i] for i in range(3)]
    for at in range(tracer.count):
        index = index_of_three()
        assert not Tracer(at).run(partial(index.point, np.arange(3), moved))
        assert entries(index) in (old, new)
