"""T19: adds through Ray over adds in one process; sampling through a handle on the owner's node over a reader's own.

Agent trajectories (37 KB with their messages), lists of 16, until all are committed: four producers, actors of Ray
with a handle each, against one thread with a buffer of its own. Beside it, what Ray alone costs: an actor that takes
as many bytes from four producers and does nothing with them, a list or a parcel of 8 MB with each call. Processor time
is that of all processes together, Ray's included. Sampling: the state workload, batch 1024, rows read
from the mapped directory in both cases; the handle does not ask for news between the draws. One call of each,
now this one first and now that, medians of all calls.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_turn, processor_seconds, ratio, seconds
from tools.bench.workloads import agent_trajectory, nbytes, state_trajectory
from trajstore import TrajectoryReplayBuffer

LIST = 16
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
        yield _sampling(options, 1)
        yield _sampling(options, 2)
    finally:
        ray.shutdown()


class _Sink:
    """Takes bytes."""

    def take(self, block: np.ndarray[Any, Any]) -> int:
        """Return how many."""
        return block.nbytes


class _Source:
    """Sends bytes to a sink, and waits until it has all."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def send(self, total: int, each: int) -> None:
        """Send so many, so many with each call."""
        import ray

        block = np.ones(each, np.uint8)
        ray.get([self._sink.take.remote(ray.put(block)) for _ in range(max(1, total // each))])


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
    from trajstore.distributed.options import HandleOptions

    total = options.count(4096, LIST * PRODUCERS)
    generator = torch.Generator().manual_seed(0)
    pool = [agent_trajectory(generator, number) for number in range(256)]
    handle = DistributedReplayBuffer.create("t19", options.folder / "ray", actor_options={"num_cpus": 1})
    producers = [ray.remote(num_cpus=0)(_Producer).remote("t19", seed) for seed in range(PRODUCERS)]
    sink = ray.remote(num_cpus=0)(_Sink).remote()
    sources = [ray.remote(num_cpus=0)(_Source).remote(sink) for _ in range(PRODUCERS)]
    one = nbytes(pool) // len(pool)

    def with_ray() -> None:
        ray.get([producer.add.remote(total // PRODUCERS) for producer in producers])

    def alone(buffer: TrajectoryReplayBuffer) -> None:
        for start in range(0, total, LIST):
            buffer.add_trajectories(pool[start % len(pool) : start % len(pool) + LIST])
        buffer.flush()

    def bare(each: int) -> None:
        ray.get([source.send.remote(total // PRODUCERS * one, each) for source in sources])

    took: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        before = processor_seconds()
        took.setdefault(name, []).append(seconds(work))
        used.setdefault(name, []).append(processor_seconds() - before)

    for repeat in range(-WARMUP, options.repeats):
        if not repeat:
            took.clear()
            used.clear()
        measure("ray", with_ray)
        folder = options.folder / "one"
        with TrajectoryReplayBuffer(enable_cache=False, auto_save=True, auto_save_path=folder) as buffer:
            measure("alone", partial(alone, buffer))
        shutil.rmtree(folder)
        measure("bare_lists", partial(bare, LIST * one))
        measure("bare_parcels", partial(bare, HandleOptions().parcel_bytes))
    for actor in (*producers, *sources, sink):
        ray.kill(actor)
    handle.stop()
    details = {f"{name}_per_second": total / median(times) for name, times in took.items()}
    details |= {f"{name}_processor_us": median(times) / total * 1e6 for name, times in used.items()}
    return Figure(
        "T19",
        "adds through Ray, four producers, over one process",
        ratio(took["alone"], took["ray"]),
        0.5,
        at_least=True,
        details=details,
    )


def _sampling(options: Options, stores: int) -> Figure:
    from trajstore.distributed import DistributedReplayBuffer

    generator = torch.Generator().manual_seed(0)
    folder = options.folder / f"sampling-{stores}"
    handle = DistributedReplayBuffer.create(
        folder.name, folder, stores=stores, refresh_interval=3600.0, actor_options={"num_cpus": 1}
    )
    for _ in range(options.count(64, 4)):
        handle.add_trajectories([state_trajectory(generator)])
    handle.flush()
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(folder / "rank_0" if stores == 1 else folder)
        took, used = in_turn(
            [lambda: handle.sample(BATCH), lambda: reader.sample(BATCH)], CALLS * options.repeats, CALLS
        )
    handle.stop()
    details = {
        "us": median(took[0]) * 1e6,
        "us_reader": median(took[1]) * 1e6,
        "processor_ratio": ratio(used[0], used[1]),
        "processor_us": median(used[0]) * 1e6,
    }
    if stores == 1:
        name, target = "sampling through a handle on the owner's node over a reader's", 1.1
    else:
        name, target = f"the same, {stores} stores, over a reader of both", None
    return Figure("T19", name, ratio(took[0], took[1]), target, details=details)
