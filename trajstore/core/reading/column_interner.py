"""The columns of everything that was resident, by number. Pure; guarded by ``Contents.lock``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.schema import ColumnSpec, Kind, Schema

ANY_AXIS = 0


class ColumnInterner:
    """Numbers columns that agree in name, dtype and shape, and sets of them that can be sampled: *signatures*.

    Comparing two trajectories is comparing their signatures, one number each. Numbers are never given up: there are as
    many as a program has kinds of trajectories.

    Attributes:
        specs: the columns, by number. Their axis means nothing; it is each slot's own.
    """

    def __init__(self) -> None:
        self.specs: list[ColumnSpec] = []
        self._numbers: dict[ColumnSpec, int] = {}
        self._known: dict[Schema, tuple[npt.NDArray[np.int64], int]] = {}
        self._signatures: dict[tuple[Kind | int, ...], int] = {}
        self._sampled: list[tuple[Kind, tuple[int, ...]]] = []

    def of(self, schema: Schema) -> tuple[npt.NDArray[np.int64], int]:
        """Return the number of each of a schema's columns, and the signature of those that can be sampled."""
        known = self._known.get(schema)
        if known is None:
            numbers = [self._number(ColumnSpec(c.name, c.dtype, c.row_shape)) for c in schema.columns]
            sampled = tuple(n for n, column in zip(numbers, schema.columns, strict=True) if column.axis <= 2)
            signature = self._signature(schema.kind, sampled)
            known = self._known[schema] = (np.array(numbers, np.int64), signature)
        return known

    def kind(self, signature: int) -> Kind:
        """Return of which kind the trajectories of this signature are."""
        return self._sampled[signature][0]

    def sampled(self, signature: int) -> tuple[int, ...]:
        """Return the numbers of the columns that can be sampled from slots of this signature."""
        return self._sampled[signature][1]

    def _number(self, spec: ColumnSpec) -> int:
        number = self._numbers.get(spec)
        if number is None:  # listed first: an interrupt in between leaves one that nobody has the number of
            self.specs.append(spec)
            number = self._numbers[spec] = len(self.specs) - 1
        return number

    def _signature(self, kind: Kind, sampled: tuple[int, ...]) -> int:
        key = (kind, *sorted(sampled))  # schemas may list the same columns in another order
        found = self._signatures.get(key)
        if found is None:
            self._sampled.append((kind, sampled))
            found = self._signatures[key] = len(self._sampled) - 1
        return found


def axes_of(schema: Schema) -> list[int]:
    """Return the axis of each column, as machine code is told it; of those that cannot be sampled, any."""
    return [column.axis if column.axis <= 2 else ANY_AXIS for column in schema.columns]
