"""T18: giving 1,000 of 100,000 trajectories a value, over adding 1,000 trajectories of 1 KB; both until durable.

One writer does both in turn, on a store made as for T8. From another process, without a writer, the whole index is
written at the end: that is a figure of its own, without a target.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.t08_open import write_store
from tools.bench.timing import in_turn, ratio
from tools.bench.workloads import opened, smalls
from trajstore import TrajectoryReplayBuffer, annotate


def figures(options: Options) -> Iterator[Figure]:
    """Yield the ratio, and the time of a call without a writer."""
    total, some = options.count(100_000, 800), options.count(1_000, 20)
    folder = options.folder / "store"
    write_store(folder, total, 100)
    random = np.random.default_rng(1)
    added = smalls(some)

    def give(to: TrajectoryReplayBuffer | str) -> None:
        annotate(to, random.permutation(total)[:some].tolist(), {"score": random.random(some)})

    with opened(folder) as writer:

        def add() -> None:
            writer.add_trajectories(added)
            writer.flush()

        given, adding = in_turn([lambda: give(writer), add], options.repeats)
    (beside,) = in_turn([lambda: give(str(folder))], options.repeats)
    details = {"annotate_ms": given.ms, "add_ms": adding.ms}
    yield Figure("T18", f"annotate {some:,} of {total:,} ÷ adding as many", ratio(given, adding), 1.0, details=details)
    yield Figure("T18", "the same through the path, without a writer", beside.ms, None, "ms")
