"""T10: the share of its time that a learner waits for batches, with steps of 20 ms, image workload.

The learner sleeps for its step, as one does that waits for a GPU; the loader's thread has a core meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from tools.bench.report import Figure, Options
from tools.bench.timing import seconds
from tools.bench.workloads import filled, image
from trajstore.loader import ReplayLoader

STEP = 0.02


def figures(options: Options) -> Iterator[Figure]:
    """Yield the share with memory used again, and with fresh memory."""
    workload = image(options)
    steps = options.count(300, 3)
    with filled(options.folder / "store", workload.trajectories, seed=0) as buffer:
        for reuse in (True, False):
            with ReplayLoader(buffer, workload.batch, reuse=reuse) as loader:
                share = _waiting(loader, steps)
            name = "in memory used again" if reuse else "in fresh memory"
            yield Figure("T10", f"learner waits, steps of 20 ms, batches {name}", share, 0.01)


def _waiting(loader: ReplayLoader, steps: int) -> float:
    for _ in range(3):
        next(loader)
    waited, began = 0.0, time.perf_counter()
    for _ in range(steps):
        time.sleep(STEP)
        waited += seconds(partial(next, loader))
    return waited / (time.perf_counter() - began)
