"""Index columns that are unpacked on first use. Pure; no I/O.

Showing and sampling a store needs half of the columns; UUIDs are most of an index and do not compress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]

MOST_ADDED = 1 << 12
"""Most additions to a lazy column; more would take more memory than the column."""


class LazyColumn:
    """A column that is unpacked on first use and shared by indexes.

    It has no lock, since a process could fork while it is held: two concurrent first users both unpack.

    Args:
        unpack: returns the column; raises :class:`CorruptStoreError` on every call if it is damaged.
        rows: number of its rows.
    """

    def __init__(self, unpack: Callable[[], Column], rows: int) -> None:
        self._unpack: Callable[[], Column] | None = unpack
        self.rows = rows
        self._column: Column = np.zeros(0)

    def column(self) -> Column:
        """Return all rows."""
        unpack = self._unpack
        if unpack is not None:
            self._column = unpack()
            self._unpack = None  # frees the packed data
        return self._column


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows ``low <= i < high`` of a lazy index column, followed by ``added``."""

    lazy: LazyColumn
    low: int
    high: int
    added: tuple[Column, ...] = ()

    def column(self) -> Column:
        """Return all rows.

        Raises:
            CorruptStoreError: unpacking failed.
        """
        rows = self.lazy.column()[self.low : self.high]
        return np.concatenate([rows, *self.added]) if self.added else rows

    @property
    def is_part(self) -> bool:
        """Whether it keeps other rows in memory, too."""
        return self.high - self.low < self.lazy.rows

    def followed_by(self, rows: Column) -> Waiting:
        """Return the column with more rows."""
        return replace(self, added=(*self.added, rows))

    def part(self, start: int, stop: int) -> Waiting:
        """Return the rows ``start <= i < stop``, counted from the first one here."""
        count = self.high - self.low
        low, high = (self.low + min(edge, count) for edge in (start, stop))
        if stop <= count:
            return Waiting(self.lazy, low, high)
        return Waiting(self.lazy, low, high, (np.concatenate(self.added)[max(start - count, 0) : stop - count],))
