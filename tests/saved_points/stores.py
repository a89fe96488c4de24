"""Stores whose trajectories identify themselves by key."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog


def block(key: int, steps: int = 4) -> Trajectory:
    """Return a trajectory ``[steps, 2, ...]`` with a different reward in every row."""
    rewards = 1000.0 * key + torch.arange(2 * steps, dtype=torch.float64).reshape(steps, 2, 1)
    return Trajectory(rewards=rewards, versions=torch.full((steps, 2, 1), float(key)))


def make(path: str | Path, **more: Any) -> TrajectoryReplayBuffer:
    """Open a store for writing."""
    return TrajectoryReplayBuffer(seed=3, auto_save=True, auto_save_path=path, sample_window_size=0, **more)


def add(buffer: TrajectoryReplayBuffer, keys: Iterable[int]) -> list[int]:
    """Add trajectories and flush; return their ids."""
    ids = buffer.add_trajectories([block(key) for key in keys])
    buffer.flush()
    return ids


def keys_of(buffer: TrajectoryReplayBuffer) -> dict[int, int]:
    """Return the key of every trajectory by id, after reading each one whole."""
    keys = {}
    for number in buffer.trajectory_ids.tolist():
        rewards = buffer.get(number).rewards
        key = int(rewards[0, 0, 0]) // 1000
        assert torch.equal(rewards, block(key, rewards.shape[0]).rewards)
        keys[number] = key
    return keys


def loaded(path: str | Path, pin: str | None = None) -> dict[int, int]:
    """Return the key of every trajectory by id, as a new reader sees them."""
    with TrajectoryReplayBuffer(seed=0, sample_window_size=0) as reader:
        reader.load_checkpoint(path, pin=pin)
        return keys_of(reader)


def state_files(path: Path) -> int:
    """Return the number of state files of saved points."""
    return len(list((path / "pins").glob("*.state")))


def names_in(path: str | Path, kind: str) -> list[str]:
    """Return the names of the snapshots of a kind; those set aside oldest first."""
    catalog = Catalog.open(open_directory(path))
    heads = catalog.asides() if kind == "aside" else catalog.snapshots()
    return [head.name for head in heads if head.kind == kind]


@contextmanager
def moments(path: Path, kept: Path) -> Iterator[list[Path]]:
    """Copy a directory before each change of its files and at the end, without repeating identical copies."""
    copies: list[Path] = []
    seen: list[dict[str, bytes]] = []
    mutex = threading.RLock()  # the writer's thread may renew metadata.json at any moment

    def copy() -> None:
        target = kept / f"{len(copies):04d}"
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("readers", "writer.lock"))
        files = {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}
        if files in seen[-1:]:
            shutil.rmtree(target)
        else:
            seen.append(files)
            copies.append(target)

    def noting(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with mutex:
                copy()
                return genuine(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "remove_folder", "sync"):
            patch.setattr(HeldFolder, name, noting(getattr(HeldFolder, name)))
        yield copies
        with mutex:
            copy()
