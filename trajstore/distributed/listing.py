"""What can be drawn, as one list, and where its samples are in a store that is mapped. Pure; no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.core.buffer.numbering import Numbering
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
        at = np.searchsorted(self.ends, places, side="right")
        return Drawn(self.ids[at], places - self.ends[at] + self.samples[at])


class Placing:
    """Turns places of samples in a listing into numbers of samples in a store that has all of it, nearly always.

    Args:
        listing: of trajectories that are all of one store.
        numbering: of its ids, by the store's reader.
    """

    def __init__(self, listing: Listing, numbering: Numbering) -> None:
        self.numbering = numbering
        self._ends = listing.ends
        self._shift = numbering.numbers - (listing.ends - listing.samples)
        self._lacking: npt.NDArray[np.bool_] | None = numbering.numbers < 0
        if not self._lacking.any():
            self._lacking = None
        first = int(self._shift[0])
        self._same = first if self._lacking is None and bool((self._shift == first).all()) else None

    @property
    def whole(self) -> bool:
        """Whether the store's reader shows all trajectories of the listing."""
        return self._lacking is None

    def numbers(self, places: IntArray) -> IntArray | None:
        """Return the numbers of samples; None if the reader does not show one of their trajectories."""
        if self._same is not None:
            return places + self._same if self._same else places
        at = np.searchsorted(self._ends, places, side="right")
        if self._lacking is not None and self._lacking[at].any():
            return None
        numbers: IntArray = places + self._shift[at]
        return numbers
