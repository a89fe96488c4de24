"""Location of a trajectory's rows. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trajstore._core.columns.fields import Axis

STARTS = ("start_samples", "start_extra", "start_document")
"""The index columns of first rows."""

START_OF: Mapping[Axis, str] = {
    Axis.SAMPLES: "start_samples",
    Axis.FIRST_EXTRA: "start_extra",
    Axis.LAST_EXTRA: "start_extra",
    Axis.RESPONSE: "start_extra",
    Axis.DOCUMENT: "start_document",
    Axis.NEXT: "start_samples",
}
"""The first-row column of each axis."""


class RowLocation(NamedTuple):
    """Location of a trajectory's rows: the table (shard or slot) and the first row on each kind of axis."""

    table: int
    start_samples: int = 0
    start_extra: int = 0
    start_document: int = 0

    def first(self, axis: Axis) -> int:
        """Return the first row of a column on this axis."""
        return int(getattr(self, START_OF[axis]))
