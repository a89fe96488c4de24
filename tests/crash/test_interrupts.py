"""Ctrl-C at random moments; the long campaign is slow. See docs/crash-testing.md."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.stores import add_each
from tools.crash.campaign import run_campaign
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore.sampling import EpochSampler
from trajstore.sampling.base import Additions, IntArray
from trajstore.testing.witness import witness


@pytest.mark.parametrize("kills", [9, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_nothing_is_lost_and_nothing_hangs_when_the_writer_is_interrupted(tmp_path: Path, kills: int) -> None:
    result = run_campaign(tmp_path, kills=kills, seed=7, interrupt=True)
    assert result.problems == []
    assert result.counts["kills"] == kills
    assert kills < 300 or result.counts["promises checked"] > 1000


@pytest.mark.parametrize("thread", ["trajstore-writer-0", "trajstore-writer-1", "trajstore-rewriter"])
def test_an_interrupt_while_opening_gives_the_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name == thread:
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", writer=WriterOptions(threads=2))
    monkeypatch.undo()
    gc.collect()  # what was being made is in a cycle
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        add_each(buffer, [1])


class _InterruptedEpochs(EpochSampler):
    """Lets the main thread be interrupted while it is told of something, and goes on when that has been noticed."""

    def __init__(self) -> None:
        super().__init__(unit="trajectory")
        self.interrupts = True
        self.noticed = threading.Event()

    def added(self, additions: Additions) -> None:
        self._roster.add(additions.ids, np.ones(len(additions), np.int64), additions.names)
        self._interrupt()
        self._sizes.append(1, len(additions))

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        if len(ids):
            self._interrupt()
        super().evicted(ids)

    def _interrupt(self) -> None:
        if self.interrupts:
            self.interrupts = False
            self.noticed.clear()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self.noticed.wait(30)


@pytest.fixture
def user_signal_interrupts() -> Iterator[None]:
    """Ctrl-C may be ignored where the tests run in the background; this signal raises instead."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("user_signal_interrupts")
def test_a_sampler_that_was_interrupted_knows_of_everything() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([witness(n) for n in range(40)])
    sampler = _InterruptedEpochs()
    for gone in (0, 12):
        buffer.evict(range(gone))
        sampler.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            buffer.sample_trajectories(7, sampler=sampler)
        sampler.noticed.set()
        buffer.sample_trajectories(7, sampler=sampler)
        assert sampler.ids.tolist() == list(range(gone, 40))
    sampler.load_state_dict(_InterruptedEpochs().state_dict())
    buffer.sample_trajectories(28, sampler=sampler)
    assert sampler.state_dict()["ids"].tolist() == list(range(12, 40))
    assert (sampler.state_dict()["place"], sampler.state_dict()["passed_over"]) == (28, 0)
