"""T19: adds through Ray over adds in one process; sampling through a handle on the owner's node over a reader's own.

Agent trajectories (37 KB with their messages), lists of 16, until all are committed: four producers, actors of Ray
with a handle each, against one thread with a buffer of its own. Processor time is that of all processes together, Ray's
included. Sampling: the state workload, batch 1024, rows read from the mapped directory in both cases; the handle does
not ask for news between the draws. One call of each, now this one first and now that, medians of all calls.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import Times, in_turn, processor_ratio, processor_seconds, ratio
from tools.bench.workloads import LIST, add_all, agents, opened, states
from trajstore import TrajectoryReplayBuffer

PRODUCERS = 4
WARMUP = 2  # of memory that all processes share, each touches each page once
BATCH = 1024
CALLS = 60  # of each, for every repeat


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures.

    Raises:
        SkippedError: Ray is not installed.
    """
    needs("ray", extra="ray")
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=PRODUCERS + 2)
    try:
        yield _adding(options, ray)
        yield _sampling(options)
    finally:
        ray.shutdown()


class _Producer:
    """Adds its part of the trajectories, and waits until they are committed."""

    def __init__(self, name: str, seed: int) -> None:
        from trajstore.distributed import DistributedReplayBuffer

        self._pool = agents(seed=seed)
        self._handle = DistributedReplayBuffer.connect(name)

    def add(self, count: int) -> None:
        """Add a number of trajectories."""
        add_all(self._handle, self._pool, count)


def _adding(options: Options, ray: Any) -> Figure:
    from trajstore.distributed import DistributedReplayBuffer

    total = options.count(4096, LIST * PRODUCERS)
    pool = agents()
    handle = DistributedReplayBuffer.create("t19", options.folder / "ray", actor_options={"num_cpus": 1})
    producers = [ray.remote(num_cpus=0)(_Producer).remote("t19", seed) for seed in range(PRODUCERS)]

    def with_ray() -> None:
        ray.get([producer.add.remote(total // PRODUCERS) for producer in producers])

    times = {name: Times(WARMUP, processor_seconds) for name in ("ray", "alone")}
    for _ in range(WARMUP + options.repeats):
        times["ray"].take(with_ray)
        folder = options.folder / "one"
        with opened(folder) as buffer:
            times["alone"].take(partial(add_all, buffer, pool, total))
        shutil.rmtree(folder)
    for actor in producers:
        ray.kill(actor)
    handle.stop()
    details = {f"{name}_per_second": total / took.seconds for name, took in times.items()}
    details |= {f"{name}_processor_us": took.processor_ms / total * 1e3 for name, took in times.items()}
    name, value = "adds through Ray, four producers, over one process", ratio(times["alone"], times["ray"])
    return Figure("T19", name, value, 0.5, at_least=True, details=details)


def _sampling(options: Options) -> Figure:
    from trajstore.distributed import DistributedReplayBuffer

    folder = options.folder / "sampling"
    handle = DistributedReplayBuffer.create(folder.name, folder, refresh_interval=3600.0, actor_options={"num_cpus": 1})
    added = states(options.count(64, 4))
    add_all(handle, added, len(added), 1)
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(folder / "rank_0")
        works = [lambda: handle.sample(BATCH), lambda: reader.sample(BATCH)]
        ours, theirs = in_turn(works, CALLS * options.repeats, warmup=CALLS, used=time.thread_time)
    handle.stop()
    details = {
        "us": ours.ms * 1e3,
        "us_reader": theirs.ms * 1e3,
        "processor_ratio": processor_ratio(ours, theirs),
        "processor_us": ours.processor_ms * 1e3,
    }
    name = "sampling through a handle on the owner's node over a reader's"
    return Figure("T19", name, ratio(ours, theirs), 1.1, details=details)
