"""Short campaigns of kills and interrupts; long ones have the marker campaign: docs/crash-testing.md."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.stores import add_each, opened
from tests.support.witness import witness
from tools.crash.campaign import Promises, run_campaign
from tools.crash.forked import forking
from tools.crash.journal import Journal
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions
from trajstore.samplers import EpochSampler

LONG = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("kills", "promises"), [(3, 0), pytest.param(200, 1000, marks=LONG)])
def test_nothing_is_lost_when_the_writer_is_killed(tmp_path: Path, kills: int, promises: int) -> None:
    result = run_campaign(tmp_path, kills=kills, seed=5)
    assert result.problems == []
    assert result.counts["kills"] == kills
    assert result.counts["promises checked"] > promises


def _after_warming() -> None:
    import numba

    import tools.crash.warm  # noqa: F401
    from trajstore._core.base import _kernels
    from trajstore._core.sampling import _tree_kernels

    kernels = [
        name
        for module in (_kernels, _tree_kernels)
        for name, kernel in vars(module).items()
        if isinstance(kernel, numba.core.dispatcher.Dispatcher) and not kernel.signatures
    ]
    sys.exit(f"add to tools/crash/warm.py: {', '.join(kernels)}" if kernels else 0)


def test_children_load_no_kernel() -> None:
    """A kernel loaded only in a child would distort the child's measured memory and calls."""
    child = forking().Process(target=_after_warming)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_losses_and_changes_are_reported(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        add_each(store, [0, 1, 2])
    journal = Journal(tmp_path / "journal")
    journal.note("evicting", ids=[3])
    journal.note("flushed", keys=[(0, 0), (1, 7), (2, 2), (3, 3), (4, 4)])
    journal.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'{"event": "flus')
    promises, problems = Promises(), list[str]()
    promises.take(tmp_path / "journal")
    assert promises.compare(tmp_path, problems.append) == 3
    assert problems == ["trajectory 4 (key 4) was flushed and is lost", "id 1 has the key 1, before 7"]


# -- Ctrl-C at random moments --


@pytest.mark.parametrize("kills", [2, pytest.param(300, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])])
def test_nothing_is_lost_and_nothing_hangs_when_the_writer_is_interrupted(tmp_path: Path, kills: int) -> None:
    result = run_campaign(tmp_path, kills=kills, seed=7, sent="INT")
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
    gc.collect()  # the half-built object is in a reference cycle
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        add_each(buffer, [1])


class _InterruptedEpochs(EpochSampler):
    """Interrupts the main thread during a notification and continues once the interrupt is noticed."""

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
            self.noticed.wait(600)


@pytest.fixture
def user_signal_interrupts() -> Iterator[None]:
    """Raise on SIGUSR1, as background jobs may ignore SIGINT."""
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
