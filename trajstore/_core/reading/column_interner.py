"""Interns columns and column sets as integers. Pure; guarded by ``Contents.lock``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import VALID, Axis
from trajstore._core.columns.schema import ColumnSpec, Kind, Schema

_ANY_AXIS = 0


class Numbered(NamedTuple):
    """The columns of a schema.

    Attributes:
        numbers: of the columns, ``[columns]``.
        signature: of the sampleable ones: those with a row for each sample, which belong to batches.
        axes: of each column for the kernels; arbitrary for columns that cannot be sampled.
    """

    numbers: IntArray
    signature: int
    axes: list[int]


class ColumnSet:
    """Columns of a batch, with the properties that copying needs.

    Attributes:
        specs: the columns.
        numbers: their numbers in the address table, ``[columns]``.
        widths: bytes per row, ``[columns]``.
        dtypes: torch dtypes.
    """

    __slots__ = ("dtypes", "numbers", "specs", "widths")

    def __init__(self, specs: Sequence[ColumnSpec], numbers: Sequence[int] = ()) -> None:
        self.specs = list(specs)
        self.numbers = np.array(numbers, np.int64)
        self.widths = np.array([spec.row_nbytes for spec in specs], np.int64)
        self.dtypes = [spec.torch_dtype for spec in specs]


class ColumnInterner:
    """Numbers columns of equal name, dtype and shape, and their sampleable sets: *signatures*.

    Two trajectories have the same columns if their signatures are equal. Numbers are never freed; there are only as
    many as the program has kinds of trajectories.

    Attributes:
        specs: the columns, by number. Ignore their axis; each slot has its own.
        sampled: kind of the trajectories and their sampleable columns, by signature.
    """

    def __init__(self) -> None:
        self.specs: list[ColumnSpec] = []
        self.sampled: list[tuple[Kind, ColumnSet]] = []
        self._numbers: dict[ColumnSpec, int] = {}
        self._known: dict[Schema, Numbered] = {}
        self._signatures: dict[tuple[Kind | int, ...], int] = {}

    def of(self, schema: Schema) -> Numbered:
        """Return the numbers, the signature and the axes of a schema's columns."""
        known = self._known.get(schema)
        if known is None:
            numbers, sampled, axes = [], [], []
            for column in schema.columns:
                numbers.append(self._number(ColumnSpec(column.name, column.dtype, column.row_shape)))
                is_sampled = (column.axis <= Axis.LAST_EXTRA or column.axis is Axis.NEXT) and column.name != VALID
                axes.append(column.axis if is_sampled else _ANY_AXIS)
                if is_sampled:
                    sampled.append(numbers[-1])
            known = Numbered(np.array(numbers, np.int64), self._signature(schema.kind, sampled), axes)
            self._known[schema] = known
        return known

    def set_of(self, numbers: Sequence[int]) -> ColumnSet:
        """Return the columns with these numbers."""
        return ColumnSet([self.specs[number] for number in numbers], numbers)

    def _number(self, spec: ColumnSpec) -> int:
        number = self._numbers.get(spec)
        if number is None:  # listed first: an interrupt in between only wastes a number
            self.specs.append(spec)
            number = self._numbers[spec] = len(self.specs) - 1
        return number

    def _signature(self, kind: Kind, sampled: Sequence[int]) -> int:
        key = (kind, *sorted(sampled))  # the order of columns may differ between schemas
        signature = self._signatures.get(key)
        if signature is None:
            self.sampled.append((kind, self.set_of(sampled)))
            signature = self._signatures[key] = len(self.sampled) - 1
        return signature
