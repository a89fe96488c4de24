"""Columns of an index that stay packed until somebody asks for them. Pure; no I/O.

Showing a store and sampling from it need neither UUIDs nor facts; and UUIDs, which no deflating makes shorter, are most
of an index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]

_MOST_ADDED = 1 << 12
"""Additions behind a column that waits; more of them would take more memory than the column."""


class Packed:
    """A column that whoever asks first unpacks; indexes share it.

    It has no lock, with which a process might be forked: of two threads that ask at once both unpack.

    Args:
        unpack: returns the column. Where it is damaged it raises :class:`CorruptStoreError`, whenever it is asked for.
    """

    def __init__(self, unpack: Callable[[], Column]) -> None:
        self._unpack: Callable[[], Column] | None = unpack
        self._column: Column = np.zeros(0)

    def column(self) -> Column:
        """Return all rows."""
        unpack = self._unpack
        if unpack is not None:
            self._column = unpack()
            self._unpack = None  # and with it what was packed
        return self._column


@dataclass(frozen=True, slots=True)
class Waiting:
    """A column of an index: rows ``low <= i < high`` of a packed one, and what was added behind them."""

    packed: Packed
    low: int
    high: int
    added: tuple[Column, ...] = ()

    @property
    def is_overfull(self) -> bool:
        """Whether it should wait no longer."""
        return len(self.added) >= _MOST_ADDED

    def column(self) -> Column:
        """Return all rows.

        Raises:
            CorruptStoreError: they cannot be unpacked.
        """
        rows = self.packed.column()[self.low : self.high]
        return np.concatenate([rows, *self.added]) if self.added else rows

    def followed_by(self, rows: Column) -> Waiting:
        """Return the column with more rows."""
        return replace(self, added=(*self.added, rows))

    def part(self, start: int, stop: int) -> Waiting:
        """Return the rows ``start <= i < stop``, counted from the first one here."""
        count = self.high - self.low
        low, high = (self.low + min(edge, count) for edge in (start, stop))
        if stop <= count:
            return Waiting(self.packed, low, high)
        return Waiting(self.packed, low, high, (np.concatenate(self.added)[max(start - count, 0) : stop - count],))
