"""Made-up sampler additions, as a buffer sends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore.samplers import Additions


def additions(
    samples: Mapping[int, int],
    versions: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    sessions: Sequence[tuple[str, int]] | None = None,
) -> Additions:
    """Return additions of trajectories, given sample counts by id."""
    known = [UNKNOWN_VERSION] * len(samples) if versions is None else versions
    columns = (np.array(list(values), np.int64) for values in (samples, samples.values(), known))
    return Additions(*columns, tasks, sessions=sessions)
