"""T17: a prioritized draw of 1,024 transitions and new priorities for them, 10^7 rows, beside cpprb.

Needs ``cpprb``, which is no part of any extra: ``pip install cpprb``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_turn, ratio
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

    def mine() -> None:
        drawn = sampler.draw(BATCH, generator)
        sampler.update(drawn.ids, drawn.samples, fresh)

    def theirs() -> None:
        peer.update_priorities(peer.sample(BATCH, beta=0.4)["indexes"], fresh)

    times = in_turn([mine, theirs], max(options.repeats, 30))
    details = {"ms": times[0].ms, "peer_ms": times[1].ms}
    yield Figure("T17", "prioritized draw and write-back ÷ cpprb", ratio(*times), 0.5, details=details)


def filled(trajectories: int) -> WeightedSampler:
    """Return a prioritized sampler of trajectories with a thousand transitions each."""
    sampler = WeightedSampler(priorities=Priorities())
    ids = np.arange(trajectories)
    sampler.added(Additions(ids, np.full(trajectories, SAMPLES), np.full(trajectories, UNKNOWN_VERSION)))
    return sampler
