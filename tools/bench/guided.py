"""Guided: what an experience costs in the index of retrieval, when it is added and when it is asked for.

Texts of 20 words, drawn by Zipf's law from 20,000, added in lists of 64. An addition's cost has its share of all
merging so far; queries are of 20 words, for the three best. Both are ratios to the cost at the smallest number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.timing import Times
from trainer_hooks.guidance import RetrievalIndex

SIZES = (1_000, 10_000, 100_000)
LIST = 64
WORDS = 20


def figures(options: Options) -> Iterator[Figure]:
    """Yield both ratios at each size."""
    smallest: tuple[float, float] | None = None
    for size in SIZES:
        count = options.count(size, 64)
        added, queried, longest = _costs(count, options.repeats)
        smallest = smallest or (added, queried)
        name = f"{count:,} experiences"
        details = {"us": added * 1e6, "longest_list_s": longest}
        yield Figure("GUIDED", f"addition to {name}, over the smallest", added / smallest[0], None, details=details)
        details = {"us": queried * 1e6}
        yield Figure("GUIDED", f"query of {name}, over the smallest", queried / smallest[1], None, details=details)


def _costs(count: int, repeats: int) -> tuple[float, float, float]:
    """Return seconds per addition, seconds per query, and the longest addition of a list."""
    generator = np.random.default_rng(0)
    index, added, queried = RetrievalIndex(), Times(), Times()
    for start in range(0, count, LIST):
        keys = range(start, min(start + LIST, count))
        added.take(partial(index.add, keys, [_text(generator) for _ in keys]))
    for _ in range(max(repeats, 1) * 3):
        queried.take(partial(index.search, _text(generator), 3))
    return sum(added.clock) / count, queried.seconds, max(added.clock)


def _text(generator: np.random.Generator) -> str:
    return " ".join(f"w{int(word) % 20_000}" for word in generator.zipf(1.3, WORDS))
