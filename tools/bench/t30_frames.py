"""T30: bytes of images that are stored once."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tools.bench.report import Figure, Options
from tools.bench.workloads import filled, image

TARGET = 1.1


def figures(options: Options) -> Iterator[Figure]:
    """Yield T30."""
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
