"""T30: bytes of images that are stored once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio
from tools.bench.workloads import filled, image

TARGET = 1.1


def figures(options: Options) -> Iterator[Figure]:
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
        yield Figure("T30", name, once.get_stats()["shard_bytes"] / distinct, TARGET, details=sizes)
        works = [partial(buffer.sample, workload.batch) for buffer in (once, twice)]
        times = in_turn(works, options.repeats * 5, calls=10, warmup=7)
        yield Figure("T30", "sample with frames stored once over two copies, image", ratio(*times), None)
