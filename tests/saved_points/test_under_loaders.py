"""A store that is rolled back, emptied or closed under a loader: no hang, only what is live, nothing left over."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from tests.saved_points.stores import add, make
from trajstore.errors import StoreClosedError
from trajstore.feeding import ReplayLoader

_PREFETCH = 3


def test_a_loader_goes_on_with_what_is_live_after_a_rollback(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        add(buffer, range(4))
        buffer.points.save(1)
        add(buffer, range(10, 30))
        with ReplayLoader(buffer, 16, prefetch=_PREFETCH, timeout=60) as loader:
            next(loader)
            buffer.points.rollback(1)
            for _ in range(_PREFETCH + 1):  # finished, or being read, when the store went back
                next(loader)
            for _ in range(5):
                assert all(value < 4000 for value in next(loader)["rewards"].flatten().tolist())


def _descriptors(folder: Path) -> int:
    """Return how many descriptors lead into a folder; the process has others, which come and go with other tests."""
    places = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            places.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(place.startswith(str(folder)) for place in places)


def _threads() -> int:
    """Return how many threads of ours there are; those of libraries come and go with other tests."""
    return sum(thread.name.startswith("trajstore-") for thread in threading.enumerate())


@pytest.mark.parametrize("what", ["rolled back", "emptied", "closed"])
def test_nothing_is_left_when_a_store_goes_under_its_loader(tmp_path: Path, what: str) -> None:
    buffer = make(tmp_path)
    add(buffer, range(4))
    buffer.points.save(1)
    add(buffer, range(4, 8))
    with ReplayLoader(buffer, 8) as loader:  # what is opened once and for all
        next(loader)
    buffer.points.rollback(1)
    threads, descriptors = _threads(), _descriptors(tmp_path)
    for _ in range(1 if what == "closed" else 5):
        loader = ReplayLoader(buffer, 8, prefetch=_PREFETCH, timeout=60)
        next(loader)
        if what == "rolled back":
            add(buffer, [50])
            buffer.points.rollback(1, aside=False)
        elif what == "emptied":
            buffer.clear()
            add(buffer, range(4))
        else:
            buffer.close()
        if what == "closed":
            with pytest.raises(StoreClosedError, match="the buffer of this loader was closed"):
                next(loader)
        else:
            next(loader)
        loader.close()
        with pytest.raises(StoreClosedError, match="the loader was closed"):
            next(loader)
    buffer.close()
    assert _threads() <= threads
    assert _descriptors(tmp_path) <= descriptors
