"""T19: adds through Ray over adds in one process; sampling through a handle on the owner's node over a reader's own.

Agent trajectories (37 KB with their messages), lists of 16, until all are committed: four producers, actors of Ray
with a handle each, against one thread with a buffer of its own. Sampling: the state workload, batch 1024, rows read
from the mapped directory in both cases; the handle does not ask for news between the draws.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from tools.bench.report import Figure, Options, SkippedError
from tools.bench.timing import alternate, ratio, seconds
from tools.bench.workloads import agent_trajectory, state_trajectory
from trajstore import TrajectoryReplayBuffer

LIST = 16
PRODUCERS = 4
BATCH = 1024


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures.

    Raises:
        SkippedError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise SkippedError("needs ray: install trajstore[ray]") from error
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=PRODUCERS + 2)
    try:
        yield _adding(options, ray)
        yield _sampling(options)
    finally:
        ray.shutdown()


class _Producer:
    """Adds its part of the trajectories, and waits until they are committed."""

    def __init__(self, name: str, seed: int) -> None:
        from trajstore.distributed import DistributedReplayBuffer

        generator = torch.Generator().manual_seed(seed)
        self._pool = [agent_trajectory(generator, number) for number in range(256)]
        self._handle = DistributedReplayBuffer.connect(name)

    def add(self, count: int) -> None:
        """Add so many."""
        for start in range(0, count, LIST):
            at = start % len(self._pool)
            self._handle.add_trajectories(self._pool[at : at + LIST])
        self._handle.flush()


def _adding(options: Options, ray: Any) -> Figure:
    from trajstore.distributed import DistributedReplayBuffer

    total = options.count(4096, LIST * PRODUCERS)
    generator = torch.Generator().manual_seed(0)
    pool = [agent_trajectory(generator, number) for number in range(256)]
    through_ray, in_process = [], []
    handle = DistributedReplayBuffer.create("t19", options.folder / "ray", actor_options={"num_cpus": 1})
    producers = [ray.remote(num_cpus=1)(_Producer).remote("t19", seed) for seed in range(PRODUCERS)]

    def with_ray() -> None:
        ray.get([producer.add.remote(total // PRODUCERS) for producer in producers])

    for repeat in range(options.repeats + 1):
        took = seconds(with_ray)
        folder = options.folder / "one"
        with TrajectoryReplayBuffer(enable_cache=False, auto_save=True, auto_save_path=folder) as buffer:

            def alone(buffer: TrajectoryReplayBuffer = buffer) -> None:
                for start in range(0, total, LIST):
                    buffer.add_trajectories(pool[start % len(pool) : start % len(pool) + LIST])
                buffer.flush()

            alone_took = seconds(alone)
        shutil.rmtree(folder)
        if repeat:  # the first one warms up
            through_ray.append(took)
            in_process.append(alone_took)
    for producer in producers:
        ray.kill(producer)
    handle.stop()
    return Figure(
        "T19",
        "adds through Ray, four producers, over one process",
        median(in_process) / median(through_ray),
        0.5,
        at_least=True,
        details={"per_second": total / median(through_ray), "per_second_alone": total / median(in_process)},
    )


def _sampling(options: Options) -> Figure:
    from trajstore.distributed import DistributedReplayBuffer

    generator = torch.Generator().manual_seed(0)
    handle = DistributedReplayBuffer.create(
        "t19-sampling", options.folder / "sampling", refresh_interval=3600.0, actor_options={"num_cpus": 1}
    )
    for _ in range(options.count(64, 4)):
        handle.add_trajectories([state_trajectory(generator)])
    handle.flush()
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(options.folder / "sampling" / "rank_0")
        mine, peer = alternate(
            [lambda: handle.sample(BATCH), lambda: reader.sample(BATCH)], options.repeats, calls=options.count(50)
        )
    handle.stop()
    return Figure("T19", "sampling through a handle on the owner's node over a reader's", ratio(mine, peer), 1.1)
