"""Where the rows of a trajectory are. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trajstore.core.columns.fields import Axis

STARTS = ("start_samples", "start_extra", "start_document")
"""The arrays of first rows."""

START_OF: Mapping[Axis, str] = {
    Axis.SAMPLES: "start_samples",
    Axis.FIRST_EXTRA: "start_extra",
    Axis.LAST_EXTRA: "start_extra",
    Axis.RESPONSE: "start_extra",
    Axis.DOCUMENT: "start_document",
}
"""Which of them says where the rows of a column on an axis begin."""


class RowLocation(NamedTuple):
    """Where the rows of a trajectory are: the table (shard or slot) and, on each kind of axis, the first row in it."""

    table: int
    start_samples: int = 0
    start_extra: int = 0
    start_document: int = 0

    def first(self, axis: Axis) -> int:
        """Return the first row of a column on this axis."""
        return int(getattr(self, START_OF[axis]))
