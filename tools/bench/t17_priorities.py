"""T17: a prioritized draw of 1,024 transitions and new priorities for them, 10^7 rows, beside cpprb.

Needs ``cpprb``, which is no part of any extra: ``pip install cpprb``.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_turn
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore.samplers import Additions, Priorities, WeightedSampler

BATCH = 1024
SAMPLES = 1000


def figures(options: Options) -> Iterator[Figure]:
    """Yield draw and write-back together.

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
    times = in_turn(works, max(options.repeats, 30))
    both = [[a + b for a, b in zip(times[at].clock, times[at + 2].clock, strict=True)] for at in range(2)]
    names = ("draw_ms", "peer_draw_ms", "write_back_ms", "peer_write_back_ms")
    details = {name: one.ms for name, one in zip(names, times, strict=True)}
    value = median(both[0]) / median(both[1])
    yield Figure("T17", "prioritized draw and write-back ÷ cpprb", value, 0.5, details=details)


def filled(trajectories: int) -> WeightedSampler:
    """Return a prioritized sampler of trajectories with a thousand transitions each."""
    sampler = WeightedSampler(priorities=Priorities())
    ids = np.arange(trajectories)
    sampler.added(Additions(ids, np.full(trajectories, SAMPLES), np.full(trajectories, UNKNOWN_VERSION)))
    return sampler
