"""Samples by number: counted over all trajectories that a buffer shows, so that many reads need one search for ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajstore.core.sampling.base import IntArray
from trajstore.core.store.index import TrajectoryIndex


@dataclass(frozen=True, slots=True, eq=False)
class Numbering:
    """Numbers of samples, for as long as no trajectory that was shown has left.

    Attributes:
        numbers: of the first sample of each trajectory that was asked for, ``[n]``; -1 where it was not shown.
        index: in which they are places.
        revision: of the index.
        first: position of its oldest trajectory, from whose first sample on they are counted.
    """

    numbers: IntArray
    index: TrajectoryIndex
    revision: int
    first: int

    def holds(self, index: TrajectoryIndex) -> bool:
        """Return whether the numbers are those of an index as it is now."""
        return (index is self.index) and (index.revision, index.first) == (self.revision, self.first)


def number(index: TrajectoryIndex, ids: IntArray) -> Numbering:
    """Return the numbers of the first samples of trajectories."""
    positions = index.find_many(ids)
    shown = np.maximum(positions, index.first)
    starts = index.ends[shown] - index.at("num_samples", shown) if len(index) else np.zeros(len(ids), np.int64)
    numbers = np.where(positions >= 0, starts - index.samples_before(index.first), -1)
    return Numbering(numbers, index, index.revision, index.first)
