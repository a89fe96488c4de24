"""What can be drawn, as one list, and where its samples are in a store that is mapped. Pure; no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajstore.core.buffer.positions import Positions
from trajstore.core.sampling.base import Drawn, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Trajectories in the order in which their samples are counted. Nobody changes it: what is new makes another one.

    Attributes:
        ids: of the trajectories, ``[n]``.
        samples: transitions of each, ``[n]``.
        ends: their running total, ``[n]``.
    """

    ids: IntArray
    samples: IntArray
    ends: IntArray

    def drawn(self, places: IntArray) -> Drawn:
        """Return the rows of samples that are told by their places among all samples."""
        at, rows = self.find(places)
        return Drawn(self.ids[at], rows)

    def find(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return which trajectory of the listing each sample is of, and its row there."""
        at = np.searchsorted(self.ends, places, side="right")
        return at, places - self.ends[at] + self.samples[at]


class Placing:
    """Where the samples of a listing are in a store that has all of it, nearly always.

    Args:
        listing: of trajectories that are all of one store.
        known: positions of its ids in the store's reader.
    """

    def __init__(self, listing: Listing, known: Positions) -> None:
        self.known = known
        self._listing = listing
        self.whole = bool((known.positions >= 0).all())
        """Whether the store's reader shows all trajectories of the listing."""

    def rows(self, places: IntArray) -> tuple[IntArray, IntArray] | None:
        """Return position and row of samples; None if the reader does not show one of their trajectories."""
        at, rows = self._listing.find(places)
        positions = self.known.positions[at]
        return None if not self.whole and positions.min() < 0 else (positions, rows)
