"""T24: the cost of the training ledger in a step of 1,024 rollouts of 4,096 response tokens: made, and stored.

A step of this size takes minutes on the accelerators that train it; the target is 1 % of 100 seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import Times
from trainer_hooks.trained import trained_step
from trajstore.ledger import Ledger

ROWS, TOKENS, GROUP = 1024, 4096, 8
TARGET_S = 1.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield the time and the size of a record."""
    rows, generator = options.count(ROWS, GROUP), torch.Generator().manual_seed(0)
    advantages, ratios = (torch.randn(rows, TOKENS, generator=generator) for _ in range(2))
    mask = torch.ones(rows, TOKENS, dtype=torch.int64)
    groups = [row // GROUP for row in range(rows)]
    made, stored = Times(warmup=1), Times(warmup=1)
    with Ledger(options.folder / "ledger") as ledger:
        for step in range(1, options.repeats + 2):
            record = made.take(
                lambda step=step: trained_step(  # type: ignore[misc]
                    step,
                    uids=groups,
                    task_ids=[f"task {group}" for group in groups],
                    mask=mask,
                    advantages=advantages,
                    ratios=ratios,
                    versions=[step] * rows,
                    replayed=[False] * rows,
                    trajectories=[step * rows + row for row in range(rows)],
                )
            )
            stored.take(lambda record=record: ledger.record(record))  # type: ignore[misc]
    size = sum(file.stat().st_size for file in (options.folder / "ledger").glob("steps-*"))
    yield Figure(
        "T24",
        f"ledger, step of {ROWS:,} rollouts of {TOKENS:,} tokens",
        made.seconds + stored.seconds,
        TARGET_S,
        "s",
        details={
            "made_s": made.seconds,
            "stored_s": stored.seconds,
            "bytes_per_row": size / rows / (options.repeats + 1),
        },
    )
