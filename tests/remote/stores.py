"""Stores with a mirror, and checks of its contents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.witness import witness
from trajstore import TrajectoryReplayBuffer
from trajstore.operations.verify import verify


def make(path: str | Path, mirror: Any, **more: Any) -> TrajectoryReplayBuffer:
    """Return a buffer on a mirrored store; it draws from all trajectories."""
    return TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, sample_window_size=0, **({"mirror": mirror} if mirror else {}), **more
    )


def add(buffer: TrajectoryReplayBuffer, keys: Iterable[int]) -> list[int]:
    """Add witnesses, and wait until they are committed."""
    ids = buffer.add_trajectories([witness(key) for key in keys])
    buffer.flush()
    return ids


def level(buffer: TrajectoryReplayBuffer) -> None:
    """Wait until the mirror is up to date, saved points included."""
    mirror = buffer._sink.mirror
    assert mirror is not None
    assert mirror._wait(lambda: mirror.is_level, 60.0), mirror.state


def is_sound(path: str | Path) -> None:
    """Fail unless verification finds nothing."""
    report = verify(path)
    assert report.sound, report.problems
