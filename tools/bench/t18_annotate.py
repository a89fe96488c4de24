"""T18: giving 1,000 of 100,000 trajectories a value, over adding 1,000 trajectories of 1 KB; both until durable.

One writer does both in turn, on a store made as for T8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.t08_open import write_store
from tools.bench.timing import in_turn, ratio
from tools.bench.workloads import add_all, opened, smalls
from trajstore import annotate


def figures(options: Options) -> Iterator[Figure]:
    """Yield the one figure."""
    total, some = options.count(100_000, 800), options.count(1_000, 20)
    folder = options.folder / "store"
    write_store(folder, total, 100)
    random = np.random.default_rng(1)
    added = smalls(some)

    with opened(folder) as writer:

        def give() -> None:
            annotate(writer, random.permutation(total)[:some].tolist(), {"score": random.random(some)})

        given, adding = in_turn([give, partial(add_all, writer, added, some, some)], options.repeats)
    details = {"annotate_ms": given.ms, "add_ms": adding.ms}
    yield Figure("T18", f"annotate {some:,} of {total:,} ÷ adding as many", ratio(given, adding), 1.0, details=details)
