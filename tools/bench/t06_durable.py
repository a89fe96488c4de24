"""T6: durable adds, one producer thread, lists of 16, flush at the end.

Agent workload: bytes per second over a plain sequential write of as many bytes with an fdatasync every 8 MiB. 1 KB
per trajectory: trajectories per second over 1 / (time of a 4 KiB append and its fdatasync). Bytes are those of the
columns. ``ratio_one_by_one`` adds each trajectory with a call of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import seconds
from tools.bench.workloads import agent_trajectory, nbytes, small_trajectory
from trajstore import AgentTrajectory, TrajectoryReplayBuffer

LIST = 16
SYNC_EVERY = 8 << 20
SYNCS = 16


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures."""
    generator = torch.Generator().manual_seed(0)
    pool = [agent_trajectory(generator, number) for number in range(256)]
    total = options.count(4096, LIST)
    ours, one_by_one, plain = _alternate(pool, total, partial(_write_plain, _bytes(pool, total)), options)
    rate = _bytes(pool, total) / median(ours)
    yield Figure(
        "T6",
        "durable adds, agent workload, bytes/s over plain writing",
        median(plain) / median(ours),
        0.6,
        at_least=True,
        details={
            "ratio_one_by_one": median(plain) / median(one_by_one),
            "mb_per_s": rate / 1e6,
            "written_mb": _bytes(pool, total) / 1e6,
        },
    )
    pool = [small_trajectory(generator, number) for number in range(256)]
    total = options.count(16384, LIST)
    ours, one_by_one, syncs = _alternate(pool, total, _sync_4k, options)
    sync = median(syncs) / SYNCS
    yield Figure(
        "T6",
        "durable adds, 1 KB, trajectories/s over 1 / fdatasync",
        total / median(ours) * sync,
        5.0,
        at_least=True,
        details={
            "ratio_one_by_one": total / median(one_by_one) * sync,
            "per_second": total / median(ours),
            "fdatasync_ms": sync * 1e3,
            "bytes_each": nbytes(pool) / len(pool),
        },
    )


def _bytes(pool: Sequence[AgentTrajectory], total: int) -> int:
    return sum(nbytes([pool[number % len(pool)]]) for number in range(total))


def _alternate(
    pool: Sequence[AgentTrajectory], total: int, plain: Callable[[Path], None], options: Options
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of adding ``total`` trajectories in lists, one by one, and of the plain thing."""
    in_lists, one_by_one, plainly = [], [], []
    store, file = options.folder / "store", options.folder / "plain"
    for repeat in range(options.repeats + 1):
        took = (
            _seconds_to_add(pool, total, LIST, store),
            _seconds_to_add(pool, total, 1, store),
            seconds(partial(plain, file)),
        )
        file.unlink()
        if repeat:  # the first one warms up
            in_lists.append(took[0])
            one_by_one.append(took[1])
            plainly.append(took[2])
    return in_lists, one_by_one, plainly


def _seconds_to_add(pool: Sequence[AgentTrajectory], total: int, size: int, folder: Path) -> float:
    with TrajectoryReplayBuffer(enable_cache=False, auto_save=True, auto_save_path=folder) as buffer:

        def add() -> None:
            for start in range(0, total, size):
                at = start % len(pool)
                buffer.add_trajectories(pool[at : at + size])
            buffer.flush()

        took = seconds(add)
    shutil.rmtree(folder)
    return took


def _write_plain(total: int, path: Path) -> None:
    block = bytes(range(256)) * (SYNC_EVERY // 256)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while total > 0:
            total -= os.write(descriptor, block[:total])
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _sync_4k(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for _ in range(SYNCS):
            os.write(descriptor, bytes(4096))
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
