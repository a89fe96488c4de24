"""T25: the first sample after a restart: a new process opens a store of 50,000 rollouts for writing, and draws 16.

Rollouts have 32 tokens; the time of opening does not depend on their length. Modules are loaded before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_child
from tools.bench.workloads import opened

ROLLOUTS, TOKENS, CALL, DRAWN = 50_000, 32, 1000, 16
TARGET_S = 1.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield the time from the call until the sample is there."""
    total, store = options.count(ROLLOUTS, CALL), options.folder / "store"
    with opened(store) as buffer:
        for start in range(0, total, CALL):
            documents = [
                {"task_id": f"task {number // 8}", "rollout_id": str(number)} for number in range(start, start + CALL)
            ]
            buffer.add_rollouts({"input_ids": torch.arange(CALL * TOKENS)}, [TOKENS] * CALL, documents)
    seconds = [in_child(_first_sample, store) for _ in range(options.repeats)]
    name = f"first sample after a restart, {ROLLOUTS:,} rollouts"
    yield Figure("T25", name, median(seconds), TARGET_S, "s", details={"max_s": max(seconds)})


def _first_sample(store: Path) -> float:
    start = time.perf_counter()
    with opened(store) as buffer:
        buffer.sample_trajectories(DRAWN)
        return time.perf_counter() - start
