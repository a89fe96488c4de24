"""T6: durable adds, one producer thread, lists of 16, flush at the end.

Agent workload: bytes per second over a plain sequential write of as many bytes with an fdatasync every 8 MiB. 1 KB
per trajectory: trajectories per second over 1 / (time of a 4 KiB append and its fdatasync). Bytes are those of the
columns.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tools.bench.report import Figure, Options
from tools.bench.timing import Times, ratio
from tools.bench.workloads import LIST, add_all, agents, nbytes, opened, smalls
from trajstore import AgentTrajectory

SYNC_EVERY = 8 << 20
SYNCS = 16


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures."""
    pool, total = agents(), options.count(4096, LIST)
    written = sum(nbytes([pool[number % len(pool)]]) for number in range(total))
    ours, plain = _measured(pool, total, partial(_write_plain, written), options)
    yield Figure(
        "T6",
        "durable adds, agent workload, bytes/s over plain writing",
        ratio(plain, ours),
        0.6,
        at_least=True,
        details={"mb_per_s": written / ours.seconds / 1e6, "written_mb": written / 1e6},
    )
    pool, total = smalls(), options.count(16384, LIST)
    ours, syncs = _measured(pool, total, _sync_4k, options)
    sync = syncs.seconds / SYNCS
    yield Figure(
        "T6",
        "durable adds, 1 KB, trajectories/s over 1 / fdatasync",
        total / ours.seconds * sync,
        5.0,
        at_least=True,
        details={
            "per_second": total / ours.seconds,
            "fdatasync_ms": sync * 1e3,
            "bytes_each": nbytes(pool) / len(pool),
        },
    )


def _measured(
    pool: Sequence[AgentTrajectory], total: int, plain: Callable[[Path], None], options: Options
) -> tuple[Times, Times]:
    """Return the times of adding so many trajectories, and of the plain thing."""
    ours, plainly = Times(warmup=1), Times(warmup=1)
    store, file = options.folder / "store", options.folder / "plain"
    for _ in range(options.repeats + 1):
        with opened(store) as buffer:
            ours.take(partial(add_all, buffer, pool, total))
        shutil.rmtree(store)
        plainly.take(partial(plain, file))
        file.unlink()
    return ours, plainly


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
