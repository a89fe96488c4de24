"""From which generation to which one a shard can be seen, and so which readers keep its files. Pure; no I/O.

Guarded as the catalog that they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trajstore.core.files.base import Reader

NEEDED = np.iinfo(np.int64).max
"""Stands for "still needed" among the generations that need a shard no longer."""


class Lifetimes:
    """Per shard (row of the shard table): the generation that brought it, and the first that needs it no longer.

    A reader that shows generation g sees the shards that came at or before g and were still needed at g. What came
    before this object was made counts as always there; what nobody needed by then, as unneeded from that generation on.
    """

    def __init__(self) -> None:
        self._born: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._unneeded: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._removed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def add(self, row: int, generation: int) -> None:
        """Note that a generation brought a shard."""
        self._reach(row + 1)
        self._born[row] = generation

    def note(self, needed: npt.NDArray[np.bool_], generation: int) -> None:
        """Note which shards are needed now; those that no longer are, are not from this generation on."""
        self._reach(len(needed))
        self._unneeded[np.flatnonzero(~needed & (self._unneeded[: len(needed)] == NEEDED))] = generation

    def waiting(self) -> npt.NDArray[np.intp]:
        """Return the shards that the store does not need and that were not removed."""
        return np.flatnonzero((self._unneeded != NEEDED) & ~self._removed)

    def held(self, rows: npt.NDArray[np.intp], reader: Reader) -> npt.NDArray[np.bool_]:
        """Return, for each of these shards, whether a reader may see it."""
        after = self._unneeded[rows] > reader.generation
        return after & (self._born[rows] <= reader.generation) if reader.settled else after

    def remove(self, rows: Sequence[int] | npt.NDArray[np.intp]) -> None:
        """Note that the files of shards are deleted."""
        self._removed[rows] = True

    def _reach(self, count: int) -> None:
        have = len(self._born)
        if count <= have:
            return
        more = max(count, 2 * have, 64) - have
        self._born = np.concatenate([self._born, np.zeros(more, np.int64)])
        self._unneeded = np.concatenate([self._unneeded, np.full(more, NEEDED)])
        self._removed = np.concatenate([self._removed, np.zeros(more, np.bool_)])
