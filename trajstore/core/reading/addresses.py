"""Where the rows of resident slots begin in memory. Changed with ``Contents.lock`` held; copies read it without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_FEWEST, _SPARE_COLUMNS = 64, 8


class Addresses:
    """A table by slot and column number, as machine code reads it.

    Attributes:
        first: address of the first row of a column, ``[slots, columns]``.
        axes: axis of the column in that slot, ``[slots, columns]``.
        signature: per slot, the signature of its columns; -1 while it is not resident.
    """

    def __init__(self) -> None:
        self.first: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self.axes: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)
        self.signature: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def reserve(self, slots: int, columns: int) -> None:
        """Have room for so many slots and columns."""
        have, width = self.first.shape
        if slots <= have and columns <= width:
            return
        rows = have if slots <= have else max(slots, 2 * have, _FEWEST)
        wide = width if columns <= width else max(columns, width + _SPARE_COLUMNS)
        # New arrays, never resized in place: a running copy keeps the ones it was given.
        first, axes = np.zeros((rows, wide), np.int64), np.zeros((rows, wide), np.int8)
        signature = np.full(rows, -1, np.int32)
        first[:have, :width], axes[:have, :width], signature[:have] = self.first, self.axes, self.signature
        self.first, self.axes, self.signature = first, axes, signature

    def set(
        self,
        slot: int,
        numbers: npt.NDArray[np.int64],
        addresses: Sequence[int] | npt.NDArray[np.int64],
        axes: Sequence[int],
        signature: int,
    ) -> None:
        """Make a slot resident: address and axis of each of these columns."""
        self.first[slot, numbers] = addresses
        self.axes[slot, numbers] = axes
        self.signature[slot] = signature  # last: from here on the addresses are used

    def clear(self, slot: int) -> None:
        """Make a slot not resident. Copies that were told its addresses may still use them."""
        self.signature[slot] = -1
