"""Stores of witnesses: opened to write, opened to read, and what they hold when they are opened again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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


@contextmanager
def another_writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Write a store in a process of its own, which can be stopped."""
    script = (
        "import sys; from trajstore import TrajectoryReplayBuffer\n"
        "with TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1]): print('open', flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.communicate("\n")
