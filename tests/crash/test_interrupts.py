"""Ctrl-C at random moments; the long campaign is slow. See docs/crash-testing.md."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from tools.crash.campaign import run_campaign
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore.testing.witness import witness


def test_nothing_is_lost_and_nothing_hangs_when_the_writer_is_interrupted(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=12, seed=7, interrupt=True)
    assert result.problems == []
    assert result.kills == 12


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_nothing_hangs_in_a_long_campaign(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=300, seed=8, interrupt=True)
    assert result.problems == []
    assert result.promised > 1000


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
        buffer.add_trajectories([witness(1)])
        buffer.flush()
