"""Memory that was given back cannot be read in simulated runs: its use ends the process."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.crash.forked import forking
from tools.simulate.released import released_is_unreadable
from trajstore._core.columns.memory import Arena
from trajstore._core.files.local import LocalDirectory


def _map(folder: Path) -> tuple[object, int]:
    mapped = LocalDirectory(folder).map("file")
    return mapped, mapped.address


def _waiting(_: Path) -> tuple[object, int]:
    lease, _ = Arena(1 << 20).take(64)
    return lease, lease.address


def _use(folder: Path, hold: Callable[[Path], tuple[object, int]]) -> None:
    with released_is_unreadable():
        held, address = hold(folder)
        del held
        (folder / "released").touch()
        ctypes.string_at(address, 1)
    os._exit(0)


@pytest.mark.parametrize("hold", [_map, _waiting])
def test_the_use_of_released_memory_ends_the_process(
    tmp_path: Path, hold: Callable[[Path], tuple[object, int]]
) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    child = forking().Process(target=_use, args=(tmp_path, hold))
    child.start()
    child.join()
    assert (tmp_path / "released").exists()
    assert child.exitcode == -signal.SIGSEGV
