"""Stores of witnesses: opened to write, opened to read, and what they hold when they are opened again."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tools.crash.forked import forking
from trajstore import TrajectoryReplayBuffer
from trajstore.files.local import LocalDirectory
from trajstore.testing.witness import check_trajectory


def opened(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    """Return a buffer that writes to a path; ``options`` are its own."""
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0, **options)


def writer_to(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    """Return a buffer that writes to a path and draws from the newest trajectories; ``options`` are its own."""
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)


def reader_of(path: Path) -> TrajectoryReplayBuffer:
    """Return a buffer that shows what a path holds."""
    reader = TrajectoryReplayBuffer(sample_window_size=0)
    reader.load_checkpoint(path)
    return reader


def contents_of(path: Path) -> list[int]:
    """Return the keys of the witnesses in a store, each compared row by row, in their order."""
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(path)
        return [check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()]


@contextmanager
def nothing_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let removing files of local directories fail as long as this is entered."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "no")

    with monkeypatch.context() as patch:
        patch.setattr(LocalDirectory, "remove", fail)
        yield


def _write_until_killed(path: Path, told: Connection) -> None:
    with writer_to(path):
        told.send("open")
        while True:
            signal.pause()


@contextmanager
def another_writer(path: Path) -> Iterator[int]:
    """Write a store in a process of its own, whose number is yielded, so that it can be stopped; in the end kill it."""
    mine, theirs = multiprocessing.Pipe()
    process = forking().Process(target=_write_until_killed, args=(path, theirs))
    process.start()
    theirs.close()  # so that a process that fails ends the waiting
    assert process.pid is not None
    assert mine.recv() == "open"
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()
