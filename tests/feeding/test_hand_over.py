"""The prefetching thread leaves the interpreter to its consumer while there is time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tests.stores import in_memory
from tests.support.waiting import wait_until
from trajstore import Trajectory
from trajstore._core.feeding import prefetch
from trajstore.loader import ReplayLoader


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of threads, one entry per pause."""
    seen: list[str] = []
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(sleep=lambda _: seen.append(threading.current_thread().name)))
    return seen


def loader(depth: int) -> ReplayLoader:
    buffer = in_memory([Trajectory(rewards=torch.rand(4, 2, 1))])
    return ReplayLoader(buffer, 4, prefetch=depth)


def until_idle(batches: ReplayLoader, depth: int) -> None:
    """Wait until all batches are finished and the thread is blocked on room."""
    running = batches._running
    assert running is not None
    wait_until(lambda: running.ready == depth and len(running._changed._waiters) == 1)  # type: ignore[attr-defined]


def test_it_pauses_when_another_batch_is_finished(pauses: list[str]) -> None:
    with loader(3) as batches:
        next(batches)
        for _ in range(3):
            until_idle(batches, 3)
            before = len(pauses)
            next(batches)
            wait_until(lambda before=before: len(pauses) > before)  # type: ignore[misc]
    assert set(pauses) == {"trajstore-prefetch"}


def test_it_does_not_pause_when_the_consumer_may_have_to_wait(pauses: list[str]) -> None:
    with loader(1) as batches:
        next(batches)
        for _ in range(5):
            until_idle(batches, 1)
            next(batches)
        until_idle(batches, 1)
    assert pauses == []
