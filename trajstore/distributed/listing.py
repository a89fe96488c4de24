"""The drawable trajectories as one list, and their positions in a memory-mapped store. Pure; no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajstore._core.base.types import IntArray
from trajstore._core.buffer.positions import Positions
from trajstore._core.sampling.base import Drawn


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Immutable list of trajectories; samples are numbered in its order.

    Attributes:
        ids: trajectory ids, ``[n]``.
        samples: transitions of each trajectory, ``[n]``.
        ends: cumulative sum of ``samples``, ``[n]``.
    """

    ids: IntArray
    samples: IntArray
    ends: IntArray

    def drawn(self, places: IntArray) -> Drawn:
        """Return the draw of samples given by their numbers in the listing."""
        at, rows = self.find(places)
        return Drawn(self.ids[at], rows)

    def find(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return each sample's trajectory position in the listing and its row in that trajectory."""
        at = np.searchsorted(self.ends, places, side="right")
        return at, places - self.ends[at] + self.samples[at]


class Placing:
    """Positions of a listing's samples in the reader of its only store.

    Args:
        listing: trajectories of one store.
        known: positions of the listing's ids in the store's reader.
    """

    def __init__(self, listing: Listing, known: Positions) -> None:
        self.known = known
        self._listing = listing
        self.whole = bool((known.positions >= 0).all())
        """True if the reader shows all trajectories of the listing."""

    def rows(self, places: IntArray) -> tuple[IntArray, IntArray] | None:
        """Return position and row of each sample; None if the reader lacks one of their trajectories."""
        at, rows = self._listing.find(places)
        positions = self.known.positions[at]
        return None if not self.whole and positions.min() < 0 else (positions, rows)
