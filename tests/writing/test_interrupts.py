"""Ctrl-C between any two instructions of a call: the store flushes and closes, and holds what it said."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interrupting import Tracer, within
from tests.stores import reader_of
from trajstore import TrajectoryReplayBuffer, WriterOptions, errors
from trajstore.buffer.backing import StoreBacking
from trajstore.inspection.verify import verify
from trajstore.interrupts import CHANGE_THREAD, uninterrupted
from trajstore.store.index import COLUMNS, TrajectoryIndex
from trajstore.store.moves import STARTS, Moved, move_entries
from trajstore.testing.witness import check_batch, check_trajectory, witness

pytestmark = pytest.mark.locks_unchecked("an exception may come within the check itself, which is code in Python")


def opened(path: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        seed=1,
        auto_save=True,
        auto_save_path=path,
        sample_window_size=0,
        cache_size=1,
        writer=WriterOptions(commit_interval=0.0, max_pending_bytes=1 << 20),
    )


def check(path: Path, buffer: TrajectoryReplayBuffer, added: dict[int, int]) -> None:
    """The buffer still works, and what was added before and after the interrupt is on disk."""
    ids: list[int] = []
    within(60, lambda: ids.extend(buffer.add_trajectories([witness(77)])))
    within(60, buffer.flush)
    assert buffer.get_stats()["pending_bytes"] == 0
    assert buffer.points.committed >= ids[0]
    within(60, lambda: check_batch(buffer.sample(4)))
    shown = buffer.trajectory_ids.tolist()
    assert len(set(shown)) == len(shown)
    within(60, buffer.close)
    with reader_of(path) as reader:
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
        within(60, buffer.close)
        assert verify(path).sound
        return
    if name == "evict":
        within(60, buffer.flush)
        if not ended:
            with suppress(errors.TrajectoryUnavailableError):  # the eviction goes on after the interrupt
                within(60, lambda: buffer.evict([0]))
        ids: list[int] = []
        within(60, lambda: ids.extend(buffer.add_trajectories([witness(9)])))
        within(60, buffer.close)
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


def test_the_rewriter_hears_of_news_after_an_interrupt_at_every_instruction_of_them(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        assert isinstance(buffer._backing, StoreBacking)
        rewriter = buffer._backing.writer.rewriter
        tracer = Tracer(None)
        tracer.run(rewriter.note)
        for at in range(tracer.count):
            assert not Tracer(at).run(rewriter.note)
            within(60, rewriter.note)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_at_every_instruction(tmp_path: Path, name: str) -> None:
    for at in range(instructions(tmp_path / "count", name)):
        interrupted_at(tmp_path / str(at), name, at)


def test_a_thread_whose_start_is_interrupted_begins_and_ends_or_never_was() -> None:
    called: list[None] = []
    tracer = Tracer(None)
    tracer.run(lambda: uninterrupted(lambda: called.append(None)))
    for at in range(tracer.count):
        Tracer(at).run(lambda: uninterrupted(lambda: called.append(None)))
    begun = [thread for thread in threading.enumerate() if thread.name == CHANGE_THREAD]
    for thread in begun:
        thread.join(60)
    assert not any(thread.is_alive() for thread in begun)
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
        assert buffer._view.contents.residency.copies.idle


def test_a_move_that_was_interrupted_leaves_entries_whole() -> None:
    """As ``refresh()`` takes in what the writer rewrote: an entry is that of the old shard or that of the new one."""
    names = ("shard", *STARTS)
    moved = Moved(7, np.arange(3), {name: np.arange(40, 43) for name in STARTS})

    def entries(index: TrajectoryIndex) -> list[list[int]]:
        return np.stack([index[name] for name in names], axis=1).tolist()

    def index_of_three() -> TrajectoryIndex:
        index = TrajectoryIndex()
        index.append({name: np.arange(3).astype(dtype) for name, dtype in COLUMNS.items()})
        return index

    move_entries(index_of_three(), moved)  # loads the kernel
    done = index_of_three()
    old = entries(done)
    tracer = Tracer(-1)
    assert tracer.run(lambda: move_entries(done, moved))
    new = entries(done)
    assert new == [[7, 40 + i, 40 + i, 40 + i] for i in range(3)]
    for at in range(tracer.count):
        index = index_of_three()
        assert not Tracer(at).run(partial(move_entries, index, moved))
        assert entries(index) in (old, new)


SIGNALS = """
import faulthandler, os, random, signal, sys
faulthandler.dump_traceback_later(300, exit=True)
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore.testing.witness import witness
path, seed = sys.argv[1], int(sys.argv[2])
armed = False
def handler(*_):
    global armed
    if armed:
        armed = False  # one at a time: a handler of its own must not be hit by the next
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0, cache_size=2,
    writer=WriterOptions(commit_interval=0.001, max_pending_bytes=100_000))
buffer.add_trajectories([witness(0)])
buffer.sample(3)  # loads the kernels: numba itself is not usable after an interrupt while it loads
chance = random.Random(seed)
returned, key, closed = {0: 0}, 0, False
print("begin", flush=True)
while not closed:
    try:
        armed = True
        what = chance.random()
        if key == 300:
            buffer.close()
            closed = True
        elif what < 0.6:
            key += 1
            returned[buffer.add_trajectories([witness(key)])[0]] = key
        elif what < 0.8:
            buffer.flush()
        elif what < 0.97 or len(returned) < 3:
            buffer.sample(3)
        else:
            victim = min(returned)
            del returned[victim]
            buffer.evict([victim])
        armed = False
    except KeyboardInterrupt:
        pass
armed = False
print(" ".join(f"{number}:{key}" for number, key in returned.items()), flush=True)
os._exit(0)
"""


def bombarded(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, "-c", SIGNALS, str(path), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begin\n"
    sent = 0
    while child.poll() is None and sent < 300:
        time.sleep(chance.uniform(0.0005, 0.02))
        child.send_signal(signal.SIGINT)
        sent += 1
    out, err = child.communicate(timeout=400)
    assert child.returncode == 0, err
    returned = {int(a): int(b) for a, b in (pair.split(":") for pair in out.split())}
    with reader_of(path) as reader:
        found = {number: check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()}
    assert returned.items() <= found.items()
    assert verify(path).sound


def test_ctrl_c_at_random_moments(tmp_path: Path) -> None:
    bombarded(tmp_path / "store", 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_ctrl_c_at_random_moments_again_and_again(tmp_path: Path, seed: int) -> None:
    bombarded(tmp_path / "store", seed)
