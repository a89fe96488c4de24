"""T10: the share of its time that a learner waits for batches, with steps of 20 ms, image workload.

The learner sleeps for its step, as one does that waits for a GPU; the loader's thread has a core meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tools.bench.report import Figure, Options
from tools.bench.workloads import image
from trajstore import TrajectoryReplayBuffer
from trajstore.feeding import ReplayLoader

STEP = 0.02


def figures(options: Options) -> Iterator[Figure]:
    """Yield the share with the loader, and without it."""
    workload = image(options)
    steps = options.count(200, 3)
    with TrajectoryReplayBuffer(
        seed=0, auto_save=True, auto_save_path=options.folder / "store", enable_cache=False, sample_window_size=0
    ) as buffer:
        buffer.add_trajectories(workload.trajectories)
        buffer.flush()
        for reuse in (True, False):
            with ReplayLoader(buffer, workload.batch, prefetch=2, reuse=reuse) as loader:
                share = _waiting(lambda: next(loader), steps)  # called within the loop
            name = "in memory used again" if reuse else "in fresh memory"
            yield Figure("T10", f"learner waits, steps of 20 ms, batches {name}", share, 0.01)
        yield Figure(
            "T10", "the same, sampling when asked", _waiting(lambda: buffer.sample(workload.batch), steps), None
        )


def _waiting(get: Callable[[], Any], steps: int) -> float:
    for _ in range(3):
        get()
    waited = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        time.sleep(STEP)
        asked = time.perf_counter()
        get()
        waited += time.perf_counter() - asked
    return waited / (time.perf_counter() - began)
