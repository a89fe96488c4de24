"""The trajectories known to a sampler, in order of addition, each with a range of tree leaves.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError

_LARGE = 1 << 16
"""Size above which entries exceed the processor's cache."""


def searched(ascending: IntArray, values: IntArray, side: Literal["left", "right"] = "left") -> IntArray:
    """Equal to ``np.searchsorted``, but sorts values first in large arrays: half the time due to caching."""
    if len(ascending) < _LARGE or len(values) < 2:
        return np.searchsorted(ascending, values, side).astype(np.int64)
    order = np.argsort(values)
    positions = np.empty(len(values), np.int64)
    positions[order] = np.searchsorted(ascending, values[order], side)
    return positions


class Growing:
    """A one-dimensional array with amortised growth at the end.

    Args:
        dtype: dtype of the values.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: npt.NDArray[Any] = np.zeros(0, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> npt.NDArray[Any]:
        """All values, a view."""
        return self._array[: self._count]

    def append(self, values: npt.ArrayLike, count: int) -> None:
        """Append ``count`` values: one each, or one for all."""
        needed = self._count + count
        if needed > len(self._array):
            grown = np.zeros(max(needed, 2 * len(self._array), 64), self._array.dtype)
            grown[: self._count] = self.values
            self._array = grown
        self._array[self._count : needed] = values
        self._count = needed

    def keep(self, places: npt.NDArray[Any]) -> None:
        """Keep only the values at these places, in this order."""
        self._array = self._array[: self._count][places]
        self._count = len(self._array)


class Roster:
    """Entries ``0 .. len - 1``, oldest first; evicted ones stay until :meth:`compact`."""

    def __init__(self) -> None:
        self._ids = Growing(np.int64)
        self._ends = Growing(np.int64)
        self._alive = Growing(np.bool_)
        self._names = Growing(np.int64)
        self._place: dict[int, int] | None = None
        """Entry by id; used only after ids came out of order."""
        self._single = True
        """Whether each entry has one leaf, so that leaf and entry numbers are equal."""
        self.live = 0
        """Number of live trajectories."""
        self.live_leaves = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def leaves(self) -> int:
        """Number of leaves of all entries."""
        return int(self._ends.values[-1]) if len(self._ends) else 0

    @property
    def ids(self) -> IntArray:
        """Trajectory id of each entry."""
        return self._ids.values

    @property
    def names(self) -> IntArray:
        """Name of each entry's trajectory; see :mod:`trajstore._core.sampling.states`."""
        return self._names.values

    @property
    def live_ids(self) -> IntArray:
        """Ids of the live trajectories."""
        return self.ids[self.alive]

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Mask of live entries."""
        return self._alive.values

    def add(self, ids: IntArray, leaves: IntArray, names: IntArray | None = None) -> IntArray:
        """Append trajectories with their leaf counts and return their entries.

        Raises:
            ConfigurationError: a trajectory is already present.
        """
        known = self.find(ids)
        if np.any(known >= 0):
            raise ConfigurationError(f"trajectory {shown_id(int(ids[known >= 0][0]))} was added twice to a sampler")
        first = len(self)
        if self._place is None and len(ids):
            before = self.ids[-1] if first else ids[0] - 1
            if np.any(np.diff(ids, prepend=before) <= 0):
                self._place = {number: entry for entry, number in enumerate(self.ids.tolist()) if self.alive[entry]}
        if self._place is not None:
            self._place |= {number: first + at for at, number in enumerate(ids.tolist())}
        self._ids.append(ids, len(ids))
        self._ends.append(self.leaves + np.cumsum(leaves), len(ids))
        self._single = self._single and bool(np.all(leaves == 1))
        self._alive.append(True, len(ids))
        self._names.append(0 if names is None else names, len(ids))
        self.live += len(ids)
        self.live_leaves += int(np.sum(leaves))
        return np.arange(first, len(self))

    def discard(self, ids: Sequence[int] | IntArray) -> IntArray:
        """Mark trajectories as evicted, and return the entries of those that were live."""
        entries = self.find(np.asarray(ids, np.int64))
        entries = np.unique(entries[entries >= 0])
        self._alive.values[entries] = False
        self.live -= len(entries)
        self.live_leaves -= int(self.leaf_counts(entries).sum())
        if self._place is not None:
            for number in self.ids[entries].tolist():
                del self._place[number]
        return entries

    def find(self, ids: IntArray) -> IntArray:
        """Return the entry of each id, -1 for absent ones."""
        if self._place is not None:
            return np.array([self._place.get(number, -1) for number in ids.tolist()], np.int64)
        entries = searched(self.ids, ids)
        live_entries = np.full(len(ids), -1, np.int64)
        inside = np.flatnonzero(entries < len(self))
        inside = inside[(self.ids[entries[inside]] == ids[inside]) & self.alive[entries[inside]]]
        live_entries[inside] = entries[inside]
        return live_entries

    def names_at(self, ids: IntArray) -> IntArray:
        """Return the name of each id's trajectory, 0 for absent ones."""
        entries = self.find(ids)
        names = np.zeros(len(ids), np.int64)
        names[entries >= 0] = self.names[entries[entries >= 0]]
        return names

    def ids_here(self, ids: IntArray, names: IntArray) -> IntArray:
        """Return ids with those of absent trajectories replaced by the ids under which their names are here.

        A split gives trajectories other ids: those of its ranks.
        """
        absent = np.flatnonzero((self.find(ids) < 0) & (names != 0))
        live, live_names = self.live_ids, self.names[self.alive]
        order = np.argsort(live_names, kind="stable")
        if not len(absent) or not len(order):
            return ids
        at = order[np.minimum(np.searchsorted(live_names[order], names[absent]), len(order) - 1)]
        moved = (live_names[at] == names[absent]) & ~np.isin(live[at], ids)
        ids = ids.copy()
        ids[absent[moved]] = live[at[moved]]
        return ids

    def first_leaf(self, entries: IntArray) -> IntArray:
        """Return the first leaf of each entry."""
        return self._ends.values[entries] - self.leaf_counts(entries)

    def leaf_counts(self, entries: IntArray) -> IntArray:
        """Return the number of leaves of each entry."""
        ends = self._ends.values
        before = np.where(entries > 0, ends[entries - 1], 0) if len(entries) else ends[:0]
        counts: IntArray = ends[entries] - before
        return counts

    def entry_of(self, leaves: IntArray) -> IntArray:
        """Return the entry of each leaf."""
        return leaves if self._single else searched(self._ends.values, leaves, "right")

    def leaf_runs(self, entries: IntArray) -> tuple[IntArray, IntArray]:
        """Return all leaves of some entries, and the number of leaves of each."""
        counts = self.leaf_counts(entries)
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return np.repeat(self.first_leaf(entries), counts) + within, counts

    def is_sparse(self) -> bool:
        """Return whether more than half of the leaves belong to evicted trajectories."""
        return 2 * self.live_leaves < self.leaves

    def compact(self) -> tuple[IntArray, IntArray]:
        """Drop evicted entries; return the kept entries and leaves, in order."""
        kept = np.flatnonzero(self.alive).astype(np.int64)
        leaves, counts = self.leaf_runs(kept)
        self._ids.keep(kept)
        self._alive.keep(kept)
        self._names.keep(kept)
        self._ends = Growing(np.int64)
        self._ends.append(np.cumsum(counts), len(kept))
        if self._place is not None:
            self._place = {number: entry for entry, number in enumerate(self.ids.tolist())}
        return kept, leaves
