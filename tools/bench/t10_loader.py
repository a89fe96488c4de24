"""T10: the share of its time that a learner waits for batches, with steps of 20 ms, image workload.

The learner sleeps for its step, as one does that waits for a GPU; the loader's thread has a core meanwhile. The bare
wait is that of a learner whose batches cost nothing. RLinf's ``PreloadReplayBufferDataset`` on its own buffer, all of
it in memory, stands beside ours if ``TRAJSTORE_RLINF`` names a checkout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tools.bench.report import Figure, Options, SkippedError
from tools.bench.rlinf import load_rlinf
from tools.bench.workloads import Workload, filled, image
from trajstore.loader import ReplayLoader

STEP = 0.02


def figures(options: Options) -> Iterator[Figure]:
    """Yield the share with the loader, without it, and with RLinf's."""
    workload = image(options)
    steps = options.count(300, 3)
    yield Figure("T10", "a learner that gets nothing waits, steps of 20 ms", _waiting(lambda: None, steps), None)
    with filled(options.folder / "store", workload.trajectories, seed=0) as buffer:
        for reuse in (True, False):
            with ReplayLoader(buffer, workload.batch, reuse=reuse) as loader:
                share = _waiting(lambda: next(loader), steps)  # called within the loop
            name = "in memory used again" if reuse else "in fresh memory"
            yield Figure("T10", f"learner waits, steps of 20 ms, batches {name}", share, 0.01)
        yield Figure(
            "T10", "the same, sampling when asked", _waiting(lambda: buffer.sample(workload.batch), steps), None
        )
    try:
        yield _rlinf(workload, steps)
    except SkippedError:  # of no matter here: this benchmark needs no peer
        return


def _rlinf(workload: Workload, steps: int) -> Figure:
    theirs = load_rlinf()
    buffer = theirs.TrajectoryReplayBuffer(seed=0, sample_window_size=len(workload.trajectories), cache_size=1000)
    buffer.add_trajectories(workload.trajectories)
    dataset = theirs.PreloadReplayBufferDataset(buffer, None, workload.batch, 1, 1)
    batches = iter(dataset)
    try:
        share = _waiting(lambda: next(batches), steps)
    finally:
        dataset._stop_event.set()  # its own close() forgets the buffer before the thread has ended
        dataset.sample_thread.join()
    return Figure("T10", "the same, RLinf's Preload dataset on its own buffer", share, None)


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
