"""T17: draws of the index alone: each sampler in its slowest window, and prioritized ones beside cpprb.

Windows are of 1,000,000 trajectories of 20 rows. The other figure is a draw of 1,024 transitions and new priorities for
them, of 10^7 rows. It needs ``cpprb``, which is no part of any extra: ``pip install cpprb``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_turn, ratio, seconds
from trajstore import samplers
from trajstore.samplers import Additions, Priorities, Sampler, WeightedSampler

BATCH = 1024
SAMPLES = 1000
MANY, FEW_SAMPLES = 1_000_000, 20
WINDOWS = (None, 100, 10_000, 500_000)

SAMPLERS: Mapping[str, Callable[[], Sampler]] = {
    "uniform by tree": WeightedSampler,
    "recency": lambda: WeightedSampler([samplers.Recency(1000)]),
    "staleness": lambda: WeightedSampler([samplers.Staleness(5)]),
    "uses with a pause": lambda: WeightedSampler([samplers.UseLimit(cooldown=1)]),
    "priorities per trajectory": lambda: WeightedSampler(priorities=Priorities(per="trajectory")),
    "priorities per transition": lambda: WeightedSampler(priorities=Priorities()),
    "epochs": samplers.EpochSampler,
    "groups of 10": lambda: samplers.GroupSampler(most=10),
}
DRAWN = {"groups of 10": 1, "uses with a pause": 1}
"""What one draw asks for, if not ``BATCH``."""


def figures(options: Options) -> Iterator[Figure]:
    """Yield the slowest window of each sampler, and draw and write-back together.

    Raises:
        SkippedError: cpprb is not installed.
    """
    for name, make in SAMPLERS.items():
        yield _windows(name, make(), DRAWN.get(name, BATCH), options)
    needs("cpprb")
    from cpprb import PrioritizedReplayBuffer

    rows = options.count(10_000_000, 10_000)
    sampler = WeightedSampler(priorities=Priorities())
    _fill(sampler, rows // SAMPLES, SAMPLES)
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


def _windows(name: str, sampler: Sampler, count: int, options: Options) -> Figure:
    """Return the figure of the slowest window."""
    many, repeats = options.count(MANY, 1_000), max(20, options.repeats)
    _fill(sampler, many, FEW_SAMPLES)
    generator = torch.Generator().manual_seed(0)
    times = {}
    for window in WINDOWS:
        work = partial(sampler.draw, count, generator, None if window is None else max(0, many - window))
        work()
        times[f"ms_{window or 'all'}"] = 1e3 * statistics.median(seconds(work) for _ in range(repeats))
    what = f"{name}, draw of {count} at {many:,} trajectories, the worst window"
    return Figure("T17", what, max(times.values()), 1.0, unit="ms", details=times)


def _fill(sampler: Sampler, trajectories: int, samples: int) -> None:
    ids = np.arange(trajectories)
    tasks = [f"task {number // 10}" for number in ids.tolist()] if sampler.needs_tasks else None
    sampler.added(Additions(ids, np.full(trajectories, samples), ids * 10 // trajectories, tasks))
