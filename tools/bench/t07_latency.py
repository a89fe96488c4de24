"""T7: time inside ``add_trajectories`` while the writer is busy, over a memcpy of the same bytes.

One trajectory of the state workload at a time, added whenever there is room and earlier ones are still being written;
memcpy is numpy's copy of one block of as many bytes, right before, under the same load, into a ring of blocks that were
written before (fresh memory would cost the system's page faults too). The figure is (99th percentile - 0.2 ms) / median
memcpy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.timing import percentile, seconds
from tools.bench.workloads import nbytes, opened, states
from trajstore import WriterOptions

ALLOWANCE = 0.2e-3
ROOM = 64 << 20


def figures(options: Options) -> Iterator[Figure]:
    """Yield the one figure."""
    pool = states(8)
    blocks = [np.zeros(nbytes([trajectory]), np.uint8) for trajectory in pool]
    ring = [np.ones_like(blocks[0]) for _ in range(ROOM // blocks[0].nbytes)]
    inside: list[float] = []
    copies: list[float] = []
    with opened(options.folder / "store", writer=WriterOptions(max_pending_bytes=4 * ROOM)) as buffer:
        wanted = options.count(1000, 50)
        number = 0
        while len(inside) < wanted:
            pending = buffer.get_stats()["pending_bytes"]
            if pending > ROOM:
                time.sleep(0.001)
                continue
            copy = seconds(partial(np.copyto, ring[number % len(ring)], blocks[number % len(pool)]))
            took = seconds(partial(buffer.add_trajectories, [pool[number % len(pool)]]))
            number += 1
            if pending and number > 20:  # the first ones warm up
                copies.append(copy)
                inside.append(took)
    memcpy = median(copies)
    yield Figure(
        "T7",
        "time in add_trajectories, p99 less 0.2 ms, over memcpy",
        (percentile(inside, 0.99) - ALLOWANCE) / memcpy,
        1.5,
        details={
            "median_ms": median(inside) * 1e3,
            "p99_ms": percentile(inside, 0.99) * 1e3,
            "memcpy_ms": memcpy * 1e3,
            "memcpy_p99_ms": percentile(copies, 0.99) * 1e3,
        },
    )
