"""Threads that read during replacements see no crash, no wrong row and no foreign id.

Released memory is unreadable there, so its use ends the process. See docs/crash-testing.md.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.crash.forked import forking
from tools.threads.campaign import run_session
from tools.threads.released import released_is_unreadable
from tools.threads.session import REPLACERS
from trajstore._core.columns.memory import Arena
from trajstore._core.columns.schema import Schema
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats import FORMATS
from trajstore._core.reading.address_table import AddressTable, MappedShard

_SHORT = 1.0
_LONG = 120.0


def _check(folder: Path, replacer: str, form: str, seconds: float) -> None:
    result = run_session(folder / "session", replacer, form, seconds, seed=0)
    assert not result.problems, "\n\n".join(result.problems)
    assert result.counts["replacements"] > 0


@pytest.mark.parametrize("replacer", REPLACERS)
def test_readers_stand_that_contents_are_replaced(tmp_path: Path, replacer: str) -> None:
    form = list(FORMATS)[
        REPLACERS.index(replacer) % len(FORMATS)
    ]  # each replacer and each format once; all pairs below
    _check(tmp_path, replacer, form, _SHORT)


@pytest.mark.campaign
@pytest.mark.timeout(_LONG + 300)
@pytest.mark.parametrize("replacer", REPLACERS)
@pytest.mark.parametrize("form", FORMATS)
def test_readers_stand_it_for_two_minutes(tmp_path: Path, replacer: str, form: str) -> None:
    _check(tmp_path, replacer, form, _LONG)


def _map(folder: Path) -> tuple[object, int]:
    mapped = LocalDirectory(folder).map("file")
    return mapped, mapped.address


def _waiting(_: Path) -> tuple[object, int]:
    lease, _ = Arena(1 << 20).take(64)
    return lease, lease.address


def _decoded(_: Path) -> tuple[object, int]:
    addresses = AddressTable(1)
    slot = addresses.add_memory(MappedShard(Schema("step", ()), [], [torch.ones(64)]), 1)
    address = addresses._rows[slot].addresses[0]
    addresses.leave(np.array([slot]))
    return None, address


_USES: dict[str, Callable[[Path], tuple[object, int]]] = {
    "a map": _map,
    "memory of a waiting trajectory": _waiting,
    "a decoded trajectory": _decoded,
}


def _use(folder: Path, what: str) -> None:
    with released_is_unreadable():
        held, address = _USES[what](folder)
        del held
        (folder / "released").touch()
        ctypes.string_at(address, 1)
    os._exit(0)


@pytest.mark.parametrize("what", _USES)
def test_the_use_of_released_memory_ends_the_process(tmp_path: Path, what: str) -> None:
    """Otherwise the sessions above would prove nothing."""
    (tmp_path / "file").write_bytes(bytes(64))
    child = forking().Process(target=_use, args=(tmp_path, what))
    child.start()
    child.join()
    assert (tmp_path / "released").exists()
    assert child.exitcode == -signal.SIGSEGV
