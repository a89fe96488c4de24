"""Warns when additions differ from earlier ones in kind or columns. No I/O.

Takes no lock: two threads that add at once may both warn of the same difference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trajstore.core.columns.fields import VALID, Axis
from trajstore.core.columns.flat import FlatTrajectory
from trajstore.core.columns.schema import Schema

logger = logging.getLogger(__name__)


class ColumnWatch:
    """Compares the columns of step trajectories with those before, and warns once of each difference.

    Warns once, too, when a store gets both blocks of steps and rollouts of agents.
    """

    def __init__(self) -> None:
        self._kind: str | None = None
        self._last: Schema | None = None
        self._told: set[str] = set()

    def begin(self, schema: Schema) -> None:
        """Set the columns of the newest existing trajectory."""
        self._kind = schema.kind
        if schema.kind == "step":
            self._last = schema

    def look(self, flats: Sequence[FlatTrajectory]) -> None:
        """Compare trajectories that are about to be added."""
        for flat in flats:
            schema = flat.schema
            if schema.kind != self._kind:
                self._compare_kinds(schema.kind)
            if schema is not self._last and schema.kind == "step":
                if self._last is not None:
                    self._compare(self._last, schema)
                self._last = schema

    def _compare_kinds(self, kind: str) -> None:
        before, self._kind = self._kind, kind
        if before is not None and "kind" not in self._told:
            self._told.add("kind")
            logger.warning(
                "this buffer has %s trajectories and is given %s trajectories: sample() refuses a draw that meets an "
                "agent trajectory, and sample_trajectories() draws both kinds; keep the two in two stores",
                before,
                kind,
            )

    def _compare(self, before: Schema, after: Schema) -> None:
        old, new = _shapes(before), _shapes(after)
        differing = [f"{name} (absent before)" for name in new.keys() - old.keys()]
        differing += [f"{name} (absent now)" for name in old.keys() - new.keys()]
        differing += [
            f"{name} (rows {list(old[name])} before, {list(new[name])} now)"
            for name in old.keys() & new.keys()
            if old[name] != new[name]
        ]
        fresh = sorted(set(differing) - self._told)
        if fresh:
            self._told.update(fresh)
            logger.warning(
                "trajectories added now have other columns than those before: %s; a sample() that draws "
                "rows of both is refused, and one that draws rows of one kind is not: name the columns (columns=...)",
                ", ".join(fresh),
            )


def _shapes(schema: Schema) -> dict[str, tuple[int, ...]]:
    apart = (column for column in schema.columns if column.axis is not Axis.DOCUMENT and column.name != VALID)
    return {column.name: column.row_shape for column in apart}
