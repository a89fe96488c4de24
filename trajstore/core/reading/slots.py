"""Maps each slot to a shard of a source or a block in memory. Pure; guarded by ``Contents.lock``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UNAVAILABLE = -1
"""Marks a trajectory that was only in memory and has been evicted; not a slot."""

_MEMORY = -1
_FEWEST = 64


class SlotTable:
    """Allocates slot numbers below its length, reusing freed ones first."""

    def __init__(self) -> None:
        self._source: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._row: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._refcounts: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._count = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return self._count

    def add_shards(
        self, source: int, rows: npt.NDArray[np.intp], entries: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.intp]:
        """Return one slot per shard of a source.

        Args:
            source: number of the source.
            rows: rows of the shards in the source's table.
            entries: reference count of each shard: entries stored in it, even if read from memory.
        """
        slots = np.arange(self._count, self._count + len(rows))
        self._reserve(self._count + len(rows))
        self._count += len(rows)
        self._source[slots], self._row[slots], self._refcounts[slots] = source, rows, entries
        return slots

    def add_shard(self, source: int, row: int, entries: int) -> int:
        """Return a slot for one more shard, see :meth:`add_shards`."""
        slot = self._new()
        self._source[slot], self._row[slot], self._refcounts[slot] = source, row, entries
        return slot

    def add_memory(self, entries: int) -> int:
        """Return a slot for ``entries`` trajectories in memory."""
        return self.add_shard(_MEMORY, UNAVAILABLE, entries)

    def are_memory(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots in memory; False for :data:`UNAVAILABLE`."""
        mask: npt.NDArray[np.bool_] = (slots >= 0) & (self._source[slots] == _MEMORY)
        return mask

    def shard_of(self, slot: int) -> tuple[int, int]:
        """Return source number and row of a slot on disk."""
        return int(self._source[slot]), int(self._row[slot])

    def leave(self, slots: npt.NDArray[np.intp]) -> list[int]:
        """Decrement the reference counts of these slots, once per occurrence.

        Returns:
            The slots without references.
        """
        left, counts = np.unique(slots, return_counts=True)
        self._refcounts[left] -= counts
        emptied: list[int] = left[self._refcounts[left] == 0].tolist()
        return emptied

    def free(self, slots: list[int]) -> None:
        """Make numbers available again; they must be unreferenced.

        Ending copies call this without ``Contents.lock``; extending a list and popping from it are atomic.
        """
        self._free.extend(slots)

    def _new(self) -> int:
        if self._free:
            return self._free.pop()
        self._reserve(self._count + 1)
        self._count += 1
        return self._count - 1

    def _reserve(self, count: int) -> None:
        have = len(self._source)
        if count <= have:
            return
        for name in ("_source", "_row", "_refcounts"):
            grown = np.zeros(max(count, 2 * have, _FEWEST), np.int32)
            grown[:have] = getattr(self, name)
            setattr(self, name, grown)
