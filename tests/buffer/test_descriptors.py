"""Descriptors of folders are closed with the objects that use them, without the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores import filled, opened
from tests.support.witness import witness
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import StoreLockedError
from trajstore.operations.copying import copy_store


def read(path: Path) -> None:
    with TrajectoryReplayBuffer.open(path) as reader:
        reader.sample(2)


def write(path: Path) -> None:
    with opened(path) as buffer:
        buffer.add_trajectories([witness(9)])


def write_beside_another(path: Path) -> None:
    with opened(path), pytest.raises(StoreLockedError):
        opened(path)


@pytest.mark.parametrize("use", [read, write, write_beside_another, lambda path: copy_store(path, f"{path}_copy")])
def test_no_descriptor_stays_open(tmp_path: Path, use: Callable[[Path], object]) -> None:
    store = filled(tmp_path / "store", range(3))
    gc.collect()
    gc.disable()
    try:
        use(store)
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        assert not [link for link in links if os.path.realpath(link).startswith(str(tmp_path))]
    finally:
        gc.enable()
