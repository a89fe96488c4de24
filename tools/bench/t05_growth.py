"""T5: rate of adding trajectories, flush included, with 100,000 in the store over the rate in an empty one.

Both add lists of 16 trajectories of 1 KB; whatever snapshots of the index fall due meanwhile is included.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import ratio, seconds
from tools.bench.workloads import small_trajectory
from trajstore import AgentTrajectory, TrajectoryReplayBuffer

TARGET = 0.95
LIST = 16


def figures(options: Options) -> Iterator[Figure]:
    """Yield the one figure."""
    full, batch = options.count(100_000, 256), options.count(10_000, 64)
    generator = torch.Generator().manual_seed(0)
    pool = [small_trajectory(generator, number) for number in range(256)]
    with _open(options.folder / "large") as large:
        for _ in range(0, full, len(pool)):
            large.add_trajectories(pool)
        large.flush()
        empty_times, large_times = [], []
        for repeat in range(options.repeats + 1):
            folder = options.folder / f"empty_{repeat}"
            with _open(folder) as empty:
                took = seconds(partial(add_all, empty, pool, batch)), seconds(partial(add_all, large, pool, batch))
            shutil.rmtree(folder)
            if repeat:  # the first one warms up
                empty_times.append(took[0])
                large_times.append(took[1])
        yield Figure(
            "T5",
            f"add rate with {full:,} trajectories in the store over an empty one",
            ratio(empty_times, large_times),
            TARGET,
            at_least=True,
            details={"added_per_repeat": batch, "per_second": batch / median(large_times), "in_the_end": len(large)},
        )


def add_all(buffer: TrajectoryReplayBuffer, pool: Sequence[AgentTrajectory], total: int) -> None:
    """Add ``total`` trajectories out of a pool, in lists of 16, and flush."""
    for start in range(0, total, LIST):
        at = start % len(pool)
        buffer.add_trajectories(pool[at : at + LIST])
    buffer.flush()


def _open(folder: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(enable_cache=False, auto_save=True, auto_save_path=folder)
