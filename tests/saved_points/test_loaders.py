"""Loaders and samplers resumed from a saved point give the same batches on any number of ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.saved_points.stores import add, make
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import StoreClosedError
from trajstore.loader import ReplayLoader
from trajstore.points import points_at
from trajstore.samplers import EpochSampler, Sampler, UseLimit, WeightedSampler

SAMPLERS: dict[str, Callable[[], Sampler | None]] = {
    "uniform": lambda: None,
    "epochs": lambda: EpochSampler(epochs=2),
    "weighted": lambda: WeightedSampler([UseLimit(cooldown=1)]),
}


def rewards(batch: dict[str, Any]) -> list[float]:
    values: list[float] = batch["rewards"].flatten().tolist()
    return values


@pytest.mark.parametrize(
    ("name", "world"), [("uniform", 1), ("uniform", 8), ("epochs", 3), ("epochs", 8), ("weighted", 1), ("weighted", 2)]
)
def test_ranks_take_up_the_loader_of_a_saved_point_whatever_was_written_after(
    tmp_path: Path, name: str, world: int
) -> None:
    """Ten trajectories of 8 rows make two epochs of 10 batches of 8 in total; stopped after the fifth batch."""
    with make(tmp_path) as writer:
        add(writer, range(10))
        with ReplayLoader(writer, 8, prefetch=3, sampler=SAMPLERS[name]()) as loader:
            begun = [rewards(next(loader)) for _ in range(5)]
            writer.points.save(5, {"loader": loader})
            rest = [rewards(next(loader)) for _ in range(15)]
        writer.evict([2, 3])
        add(writer, range(10, 14))
    state = points_at(tmp_path).state(5)["loader"]
    ranks = [
        ReplayLoader(
            TrajectoryReplayBuffer.open(tmp_path, pin="step-5"), 8, rank=(rank, world), sampler=SAMPLERS[name]()
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = [[value for rank in ranks for value in rewards(next(rank))] for _ in range(15)]
    for rank in ranks:
        rank.close()
    assert resumed == rest
    if name == "epochs":
        rows = list(itertools.chain(*begun, *resumed))
        assert sorted(rows) == sorted(2 * [1000.0 * key + row for key in range(10) for row in range(8)])


# -- a store rolled back, emptied or closed under its loader: no hang, live data only, no leak --

_PREFETCH = 3


def _descriptors(folder: Path) -> int:
    """Return the number of descriptors in a folder, ignoring those of other tests."""
    places = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            places.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(place.startswith(str(folder)) for place in places)


def _threads() -> int:
    """Return the number of our threads, ignoring those of libraries."""
    return sum(thread.name.startswith("trajstore-") for thread in threading.enumerate())


@pytest.mark.parametrize("what", ["rolled back", "emptied", "closed"])
def test_nothing_is_left_when_a_store_goes_under_its_loader(tmp_path: Path, what: str) -> None:
    buffer = make(tmp_path)
    add(buffer, range(4))
    buffer.points.save(1)
    add(buffer, range(4, 8))
    with ReplayLoader(buffer, 8) as loader:  # opens everything that is opened only once
        next(loader)
    buffer.points.rollback(1)
    threads, descriptors = _threads(), _descriptors(tmp_path)
    for _ in range(1 if what == "closed" else 5):
        loader = ReplayLoader(buffer, 8, prefetch=_PREFETCH, timeout=600)
        next(loader)
        if what == "rolled back":
            add(buffer, [50])
            buffer.points.rollback(1, aside=False)
            for _ in range(_PREFETCH + 1):  # prefetched, or being read, during the rollback
                next(loader)
            assert all(max(rewards(next(loader))) < 4000 for _ in range(5))
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
