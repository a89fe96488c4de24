"""The valid rows of trajectories with a field ``valid``, for draws. Guarded by ``Contents.lock``.

Draws and samplers count a trajectory's valid rows only: *place* k is its k-th valid row. Without the field, places and
rows are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import Flags, IntArray
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError

_MOST_BYTES = 64 << 20
"""Size of the cache, above which it is emptied."""


@dataclass(frozen=True, slots=True)
class Valid:
    """The valid rows of several trajectories.

    Attributes:
        flags: per trajectory, whether each row is valid.
        rows: per trajectory, the valid rows.
    """

    flags: Sequence[Flags]
    rows: Sequence[npt.NDArray[np.unsignedinteger]]

    def at(self, which: IntArray, places: IntArray) -> IntArray:
        """Return the rows at places of trajectories, given by their number here, both ``[n]``."""
        rows: IntArray = _picked(self.rows, which, places).astype(np.int64)
        return rows

    def has(self, which: IntArray, rows: IntArray) -> Flags:
        """Return whether rows of trajectories are valid, both ``[n]``."""
        return _picked(self.flags, which, rows)


def _picked(parts: Sequence[npt.NDArray[Any]], which: IntArray, places: IntArray) -> npt.NDArray[Any]:
    sizes = np.array([len(part) for part in parts])
    picked: npt.NDArray[Any] = np.concatenate(parts)[(np.cumsum(sizes) - sizes)[which] + places]
    return picked


class ValidRows:
    """A cache of valid rows, by trajectory id."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Flags, npt.NDArray[np.unsignedinteger]]] = {}
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
            self._known[int(ids[at])] = flags.copy(), rows
            self._nbytes += flags.nbytes + rows.nbytes
        return Valid(*zip(*(self._known[number] for number in ids.tolist()), strict=True))
