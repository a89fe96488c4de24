"""T34: large changes of a store of 1 KB rollouts: time ÷ writing them, and what other threads wait meanwhile.

Half are evicted (every second one), the rest is compacted, all get a value. Beside each, one thread adds a trajectory,
one draws sixteen and one gets one, with pauses of 2 ms; details have the longest call of each, and the longest of all
in a second before. Other programs on the machine lengthen calls: run it alone, or with ``chrt --rr 1``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.timing import seconds
from tools.bench.workloads import add_all, opened, smalls
from tools.meanwhile import meanwhile
from trajstore import TrajectoryReplayBuffer, annotate

LIST = 512
WAIT_MS = 20.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield the time of each change ÷ writing, and the longest wait."""
    total, folder = options.count(200_000, 800), options.folder / "written"
    with opened(folder) as buffer:
        writing = seconds(lambda: add_all(buffer, smalls(LIST), total, LIST))
    half, values = range(0, total, 2), np.random.default_rng(0).random(total)
    changes: dict[str, tuple[float, Callable[[TrajectoryReplayBuffer], object]]] = {
        "evict half": (0.1, lambda buffer: buffer.evict(half)),
        "annotate all": (0.2, lambda buffer: annotate(buffer, range(total), {"score": values})),
        "compact after half was evicted": (1.0, lambda buffer: buffer.compact()),
    }
    for name, (most, change) in changes.items():
        copy = options.folder / "copy"
        shutil.copytree(folder, copy)
        took, before, longest = _beside(copy, name.startswith("compact"), half, change)
        shutil.rmtree(copy)
        yield Figure("T34", f"{name} of {total:,} ÷ writing them", took / writing, most, details={"seconds": took})
        if longest and before:  # else no other thread called in that time
            details = longest | {"without_a_change": max(before.values())}
            yield Figure(
                "T34", f"{name}, longest call beside it", max(longest.values()), WAIT_MS, "ms", details=details
            )


def _beside(
    path: Path, evicted: bool, half: range, change: Callable[[TrajectoryReplayBuffer], object]
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return seconds of a change, and the longest calls in ms of each thread before and during it."""
    longest, added = dict[str, float](), smalls(1)
    with opened(path) as buffer:
        if evicted:
            buffer.evict(half)
        newest = int(buffer.trajectory_ids[-1])

        def timed(name: str, call: Callable[[], object]) -> None:
            longest[name] = max(longest.get(name, 0.0), 1e3 * seconds(call))

        calls: dict[str, Callable[[], object]] = {
            "add": lambda: buffer.add_trajectories(added),
            "draw": lambda: buffer.sample_trajectories(16),
            "get": lambda: buffer.get(newest),
        }
        with ExitStack() as threads:
            for name, call in calls.items():
                call()
                threads.enter_context(meanwhile(partial(timed, name, call), 0.002))
            time.sleep(0.5)
            longest.clear()
            time.sleep(1)
            before = dict(longest)
            longest.clear()
            took = seconds(lambda: change(buffer))
    return took, before, longest
