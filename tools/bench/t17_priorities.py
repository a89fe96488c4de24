"""T17: a prioritized draw of 1,024 transitions and new priorities for them, 10^7 rows, beside cpprb.

Needs ``cpprb``, which is no part of any extra: ``pip install cpprb``. TorchRL's prioritized sampler stands beside it
where its extension loads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import alternate, ratio
from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.sampling import Additions, Priorities, WeightedSampler

BATCH = 1024
SAMPLES = 1000


def figures(options: Options) -> Iterator[Figure]:
    """Yield draw and write-back together, and each alone.

    Raises:
        SkippedError: cpprb is not installed.
    """
    needs("cpprb")
    from cpprb import PrioritizedReplayBuffer

    rows = options.count(10_000_000, 10_000)
    sampler = filled(rows // SAMPLES)
    peer = PrioritizedReplayBuffer(rows, {"x": {"dtype": np.uint8}}, alpha=0.6)
    peer.add(x=np.zeros(rows, np.uint8))
    generator, chance = torch.Generator().manual_seed(0), np.random.default_rng(0)
    spread = chance.random(rows).astype(np.float32)
    peer.update_priorities(np.arange(rows), spread)
    ids, places = np.repeat(np.arange(rows // SAMPLES), SAMPLES), np.tile(np.arange(SAMPLES), rows // SAMPLES)
    for start in range(0, rows, 1_000_000):
        part = slice(start, start + 1_000_000)
        sampler.update(ids[part], places[part], spread[part])
    fresh = chance.random(BATCH)
    drawn: list[Any] = [sampler.draw(BATCH, generator), peer.sample(BATCH, beta=0.4)]

    def mine() -> None:
        drawn[0] = sampler.draw(BATCH, generator)

    def theirs() -> None:
        drawn[1] = peer.sample(BATCH, beta=0.4)

    works = (
        mine,
        theirs,
        lambda: sampler.update(drawn[0].ids, drawn[0].samples, fresh),
        lambda: peer.update_priorities(drawn[1]["indexes"], fresh),
    )
    times = alternate(works, max(options.repeats, 30))
    both = [[a + b for a, b in zip(times[at], times[at + 2], strict=True)] for at in range(2)]
    names = ("draw", "write back")
    details = {f"{name}_ms": 1e3 * float(np.median(times[2 * at])) for at, name in enumerate(names)}
    details |= {f"peer_{name}_ms": 1e3 * float(np.median(times[2 * at + 1])) for at, name in enumerate(names)}
    yield Figure("T17", "prioritized draw and write-back ÷ cpprb", ratio(*both), 0.5, details=details)
    try:
        yield _torchrl(sampler, generator, spread, fresh, options)
    except (ImportError, RuntimeError) as error:  # TorchRL says so when it was built for another torch
        sys.stderr.write(f"T17 without TorchRL: {error}\n")


def _torchrl(sampler: WeightedSampler, generator: torch.Generator, spread: Any, fresh: Any, options: Options) -> Figure:
    from torchrl.data import LazyTensorStorage, PrioritizedSampler

    rows = len(spread)
    storage: Any = LazyTensorStorage(rows)
    storage.set(range(rows), torch.zeros(rows, 1, dtype=torch.uint8))
    peer: Any = PrioritizedSampler(rows, alpha=0.6, beta=0.4)
    peer.extend(torch.arange(rows))
    peer.update_priority(torch.arange(rows), torch.from_numpy(spread))
    new = torch.from_numpy(fresh).float()

    def mine() -> None:
        drawn = sampler.draw(BATCH, generator)
        sampler.update(drawn.ids, drawn.samples, fresh)

    def theirs() -> None:
        drawn, _ = peer.sample(storage, BATCH)
        peer.update_priority(drawn, new)

    times = alternate([mine, theirs], max(options.repeats, 30))
    return Figure("T17", "the same ÷ TorchRL", ratio(*times), None)


def filled(trajectories: int) -> WeightedSampler:
    """Return a prioritized sampler of trajectories with a thousand transitions each."""
    sampler = WeightedSampler(priorities=Priorities())
    ids = np.arange(trajectories)
    sampler.added(Additions(ids, np.full(trajectories, SAMPLES), np.full(trajectories, UNKNOWN_VERSION)))
    return sampler
