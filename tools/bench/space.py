"""Space: bytes of shard files over live bytes, after 99 of 100 trajectories were evicted at random.

Trajectories of 8 KB. First as the writer leaves it by itself, then after ``compact()``. T30: bytes of images that are
stored once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from math import prod

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio
from tools.bench.workloads import add_all, filled, image, opened
from trajstore import Trajectory, TrajectoryReplayBuffer

TARGET = 2.5
"""Twice the live bytes and 1 MiB, of which there are 3.4 MB, and the headers of the files."""

COMPACT_TARGET = 1.1
FRAMES_TARGET = 1.1
_SECONDS = 60.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures."""
    count = options.count(40_000, 2_000)
    pool = [Trajectory(actions=torch.randn(16, 4, 32), rewards=torch.rand(16, 4, 1)) for _ in range(50)]
    with opened(options.folder / "store") as buffer:
        add_all(buffer, pool, count, len(pool))
        full = buffer.get_stats()["shard_bytes"]
        going = buffer.trajectory_ids.tolist()
        random.Random(0).shuffle(going)
        for start in range(0, count * 99 // 100, count // 100):
            buffer.evict(going[start : start + count // 100])
        began = time.monotonic()
        while _over(buffer) > TARGET and time.monotonic() - began < _SECONDS:
            time.sleep(0.05)
        details = {"full_bytes": full, "waited_s": time.monotonic() - began}
        yield Figure(
            "SPACE", "shard bytes over live bytes, 99 % evicted at random", _over(buffer), TARGET, details=details
        )
        buffer.compact()
        yield Figure("SPACE", "the same after compact()", _over(buffer), COMPACT_TARGET)


def frames_once(options: Options) -> Iterator[Figure]:
    """Yield T30, and the time of ``sample`` with images stored once over that with two copies, both mapped."""
    workload = image(options)
    steps, batch, *shape = workload.trajectories[0].curr_obs["main_images"].shape
    distinct = len(workload.trajectories) * (steps + 1) * batch * prod(shape)
    stores = {
        once: filled(options.folder / f"{once}", workload.trajectories, seed=0, store_frames_once=once)
        for once in (False, True)
    }
    with stores[False] as twice, stores[True] as once:
        sizes = {"bytes_with_two_copies": twice.get_stats()["shard_bytes"] / distinct}
        name = "bytes of image on disk over bytes of its distinct frames"
        yield Figure("T30", name, once.get_stats()["shard_bytes"] / distinct, FRAMES_TARGET, details=sizes)
        works = [partial(buffer.sample, workload.batch) for buffer in (once, twice)]
        times = in_turn(works, options.repeats * 5, calls=10, warmup=7)
        yield Figure("T30", "sample with frames stored once over two copies, image", ratio(*times), None)


def _over(buffer: TrajectoryReplayBuffer) -> float:
    stats = buffer.get_stats()
    return stats["shard_bytes"] / stats["live_bytes"]
