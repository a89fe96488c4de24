"""Time of a draw of 1,024 rows with each sampler, from 10^4 to 10^8 rows of the index alone.

The figure is the time at the most rows over that at the fewest. What grows as a logarithm does grows by 2 between them
where it is of rows, by 5 where it is of trajectories (10 to 100,000). Memory that no cache holds costs besides: how
much says the bare reading of as many cells of an array of as many rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio, seconds
from trajstore import samplers
from trajstore.samplers import Additions, Priorities, Sampler, WeightedSampler

BATCH = 1024
SAMPLES = 1000
TRAJECTORIES = (10, 1_000, 100_000)
MANY = 1_000_000
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


def figures(options: Options) -> Iterator[Figure]:
    """Yield a figure for each sampler."""
    counts = [options.count(count, 10) for count in TRAJECTORIES]
    yield _bare(counts, options)
    for name, make in SAMPLERS.items():
        samplers = [_filled(make(), count) for count in counts]
        generator = torch.Generator().manual_seed(0)
        count = BATCH if sampler_draws_rows(name) else 1  # few trajectories: few uses
        works = [partial(sampler.draw, count, generator) for sampler in samplers]
        yield _growth(f"{name}, draw of {count}", works, counts, options)
        del samplers, works
        yield _windows(name, make(), count, options)


def _windows(name: str, sampler: Sampler, count: int, options: Options) -> Figure:
    """Return the figure of the slowest window."""
    many, repeats = options.count(MANY, 1_000), max(20, options.repeats)
    _filled(sampler, many, 20)
    generator = torch.Generator().manual_seed(0)
    times = {}
    for window in WINDOWS:
        work = partial(sampler.draw, count, generator, None if window is None else max(0, many - window))
        work()
        times[f"ms_{window or 'all'}"] = 1e3 * statistics.median(seconds(work) for _ in range(repeats))
    what = f"{name}, draw of {count} at {many:,} trajectories, the worst window"
    return Figure("SAMPLERS", what, max(times.values()), 1.0, unit="ms", details=times)


def _bare(counts: Sequence[int], options: Options) -> Figure:
    """Return the figure of reading 1,024 cells anywhere, others each time, of arrays as long as the transitions."""
    repeats = max(20, options.repeats)
    works = [_reading(count * SAMPLES, repeats + 2) for count in counts]
    return _growth(f"bare read of {BATCH} cells", works, counts, options)


def _growth(what: str, works: Sequence[Callable[[], object]], counts: Sequence[int], options: Options) -> Figure:
    """Return how much longer something takes at the most rows than at the fewest."""
    times = in_turn(works, max(20, options.repeats))
    details = {f"us_{count * SAMPLES:.0e}": 1e3 * one.ms for count, one in zip(counts, times, strict=True)}
    return Figure("SAMPLERS", f"{what}: most rows ÷ fewest", ratio(times[-1], times[0]), None, details=details)


def _reading(rows: int, times: int) -> Callable[[], object]:
    cells = np.ones(rows)
    drawn = iter(np.random.default_rng(0).integers(rows, size=(times, BATCH)))
    return lambda: cells.take(next(drawn))


def sampler_draws_rows(name: str) -> bool:
    """Return whether a sampler draws a thousand rows, also of ten trajectories."""
    return name not in ("groups of 10", "uses with a pause")


def _filled(sampler: Sampler, trajectories: int, samples: int = SAMPLES) -> Sampler:
    ids = np.arange(trajectories)
    tasks = [f"task {number // 10}" for number in ids.tolist()] if sampler.needs_tasks else None
    sampler.added(Additions(ids, np.full(trajectories, samples), ids * 10 // trajectories, tasks))
    return sampler
