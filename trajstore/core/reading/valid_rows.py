"""The valid rows of trajectories with a field ``valid``, for draws. Guarded by ``Contents.lock``.

Draws and samplers count a trajectory's valid rows only: *place* k is its k-th valid row. Without the field, places and
rows are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError

IntArray = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_MOST_BYTES = 64 << 20
"""Size of the cache, above which it is emptied."""

_STRIDE = 1 << 40
"""More than the rows of any trajectory."""


@dataclass(frozen=True, slots=True)
class Valid:
    """The valid rows of several trajectories.

    Attributes:
        rows: of all, one trajectory after the other.
        starts: where each trajectory's begin, ``[trajectories]``.
    """

    rows: IntArray
    starts: IntArray

    def at(self, which: IntArray, places: IntArray) -> IntArray:
        """Return the rows at places of trajectories, given by their number here, both ``[n]``."""
        rows: IntArray = self.rows[self.starts[which] + places]
        return rows

    def has(self, which: IntArray, rows: IntArray) -> Flags:
        """Return whether rows of trajectories are valid, both ``[n]``."""
        counts = np.diff(self.starts, append=len(self.rows))
        keys = self.rows + np.repeat(np.arange(len(counts)) * _STRIDE, counts)
        return np.isin(rows + which * _STRIDE, keys)


class ValidRows:
    """A cache of valid rows, by trajectory id."""

    def __init__(self) -> None:
        self._known: dict[int, npt.NDArray[np.unsignedinteger]] = {}
        self._nbytes = 0

    def of(self, ids: IntArray, counts: IntArray, read: Callable[[IntArray], list[Flags]]) -> Valid:
        """Return the valid rows of trajectories.

        Args:
            ids: distinct ids.
            counts: number of valid rows of each, as the index says.
            read: returns the field of trajectories, given by their numbers among ``ids``.

        Raises:
            CorruptStoreError: a field has another number of valid rows than the index; names the trajectory.
        """
        if self._nbytes > _MOST_BYTES:
            self._known, self._nbytes = {}, 0
        absent = np.flatnonzero([number not in self._known for number in ids.tolist()])
        for at, flags in zip(absent.tolist(), read(absent) if len(absent) else (), strict=True):
            rows = np.flatnonzero(flags).astype(np.min_scalar_type(len(flags)))
            if len(rows) != counts[at]:
                raise CorruptStoreError(
                    f"trajectory {shown_id(int(ids[at]))}: its field valid has {len(rows)} valid steps, the index "
                    f"says {counts[at]}"
                )
            self._known[int(ids[at])] = rows
            self._nbytes += rows.nbytes
        parts = [self._known[number] for number in ids.tolist()]
        sizes = np.array([len(part) for part in parts])
        return Valid(np.concatenate(parts).astype(np.int64), np.cumsum(sizes) - sizes)
