"""Positions of trajectories in a buffer, kept so that many reads need one search for ids."""

from __future__ import annotations

from dataclasses import dataclass

from trajstore._core.base.types import IntArray
from trajstore._core.store.index import TrajectoryIndex


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Positions of trajectories in an index, valid until a trajectory leaves it.

    Attributes:
        positions: of each requested trajectory, ``[n]``; -1 if it was not shown.
        index: that they refer to.
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
        """Return whether the positions are still valid for an index."""
        return (index is self.index) and (index.revision, index.first) == (self.revision, self.first)
