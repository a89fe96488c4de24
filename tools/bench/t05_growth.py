"""T5: rate of adding trajectories, flush included, with 100,000 in the store over the rate in an empty one.

Both add lists of 16 trajectories of 1 KB; whatever snapshots of the index fall due meanwhile is included.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

from tools.bench.report import Figure, Options
from tools.bench.timing import Times, ratio
from tools.bench.workloads import add_all, opened, smalls

TARGET = 0.95


def figures(options: Options) -> Iterator[Figure]:
    """Yield the one figure."""
    full, batch = options.count(100_000, 256), options.count(10_000, 64)
    pool = smalls()
    empty, large = Times(warmup=1), Times(warmup=1)
    with opened(options.folder / "large") as store:
        add_all(store, pool, full, len(pool))
        for repeat in range(options.repeats + 1):
            folder = options.folder / f"empty_{repeat}"
            with opened(folder) as other:
                empty.take(partial(add_all, other, pool, batch))
                large.take(partial(add_all, store, pool, batch))
            shutil.rmtree(folder)
        yield Figure(
            "T5",
            f"add rate with {full:,} trajectories in the store over an empty one",
            ratio(empty, large),
            TARGET,
            at_least=True,
            details={"added_per_repeat": batch, "per_second": batch / large.seconds, "in_the_end": len(store)},
        )
