"""Positions of trajectories that a buffer shows, kept so that many reads need one search for ids."""

from __future__ import annotations

from dataclasses import dataclass

from trajstore.core.sampling.base import IntArray
from trajstore.core.store.index import TrajectoryIndex


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Positions of trajectories in an index, for as long as no trajectory has left it.

    Attributes:
        positions: of each trajectory that was asked for, ``[n]``; -1 where it was not shown.
        index: in which they count.
        revision: of the index.
        first: position of its oldest trajectory.
    """

    positions: IntArray
    index: TrajectoryIndex
    revision: int
    first: int

    @staticmethod
    def of(index: TrajectoryIndex, ids: IntArray) -> Positions:
        """Return the positions of trajectories."""
        return Positions(index.find_many(ids), index, index.revision, index.first)

    def hold(self, index: TrajectoryIndex) -> bool:
        """Return whether the positions are those of an index as it is now."""
        return (index is self.index) and (index.revision, index.first) == (self.revision, self.first)
