"""Tracks the generations in which shards are visible, and so which readers need their files. Pure; no I/O.

Guarded like the catalog it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trajstore.core.files.base import Reader

NEEDED = np.iinfo(np.int64).max
"""Value for shards that are still needed."""


class Lifetimes:
    """Per shard (row of the shard table): the generation that added it, and the first that does not need it.

    A reader at generation g sees the shards added at or before g and still needed at g. Shards older than this object
    count as always present; shards unneeded at its creation, as unneeded from that generation on.
    """

    def __init__(self) -> None:
        self._born: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._unneeded: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._removed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def add(self, row: int, generation: int) -> None:
        """Set the generation that added a shard."""
        self._reach(row + 1)
        self._born[row] = generation

    def note(self, needed: npt.NDArray[np.bool_], generation: int) -> None:
        """Set the needed shards; others count as unneeded from this generation on."""
        self._reach(len(needed))
        self._unneeded[np.flatnonzero(~needed & (self._unneeded[: len(needed)] == NEEDED))] = generation

    def waiting(self) -> npt.NDArray[np.intp]:
        """Return the unneeded shards that were not removed."""
        return np.flatnonzero((self._unneeded != NEEDED) & ~self._removed)

    def held(self, rows: npt.NDArray[np.intp], reader: Reader) -> npt.NDArray[np.bool_]:
        """Return, per shard, whether a reader may see it."""
        after = self._unneeded[rows] > reader.generation
        return after & (self._born[rows] <= reader.generation) if reader.settled else after

    def remove(self, rows: Sequence[int] | npt.NDArray[np.intp]) -> None:
        """Mark the files of shards as deleted."""
        self._removed[rows] = True

    def _reach(self, count: int) -> None:
        have = len(self._born)
        if count <= have:
            return
        more = max(count, 2 * have, 64) - have
        self._born = np.concatenate([self._born, np.zeros(more, np.int64)])
        self._unneeded = np.concatenate([self._unneeded, np.full(more, NEEDED)])
        self._removed = np.concatenate([self._removed, np.zeros(more, np.bool_)])
