"""Schema of a trajectory's columns, and its numbers of rows. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import VALID, Axis
from trajstore._core.columns.limits import plain_name, shown
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError

Kind = Literal["step", "agent"]

DOCUMENT = "_document"
"""Name of the column that holds a trajectory's JSON document, as bytes."""

_MAX_ROW_NBYTES = 1 << 48
"""Larger than any memory; sums of smaller numbers do not overflow."""

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


@cache
def dtypes() -> Mapping[str, torch.dtype]:
    """Return every dtype that can be stored, by its name without ``torch.``."""
    return {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column: its dotted name, dtype (without ``torch.``), shape of one row, and axis."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    axis: Axis = Axis.SAMPLES

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a ``torch.dtype``.

        Raises:
            CorruptStoreError: no such dtype.
        """
        try:
            return dtypes()[self.dtype]
        except KeyError:
            raise CorruptStoreError(f"column {self.name}: unknown dtype {self.dtype!r}") from None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.row_shape) * self.torch_dtype.itemsize


_AXES: dict[Kind, tuple[Axis, ...]] = {
    "step": (Axis.SAMPLES, Axis.FIRST_EXTRA, Axis.LAST_EXTRA, Axis.DOCUMENT, Axis.NEXT),
    "agent": (Axis.SAMPLES, Axis.RESPONSE, Axis.DOCUMENT),
}
"""Units that the rows of columns can count."""


@dataclass(frozen=True)
class Schema:
    """The columns of a trajectory, in storage order, and its kind."""

    kind: Kind
    columns: tuple[ColumnSpec, ...]

    @cached_property
    def row_nbytes(self) -> tuple[int, ...]:
        """Bytes of one row, per column."""
        return tuple(column.row_nbytes for column in self.columns)

    def nbytes(self, extent: Extent) -> int:
        """Return the bytes of all columns of a trajectory."""
        steps, batch, extra, document = extent
        samples, first, last, response, text = self.axis_nbytes  # 0 for an axis without columns
        return steps * batch * samples + (steps + extra) * batch * (first + last) + extra * response + document * text

    def plain_nbytes(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each column with these numbers of rows, neither packed nor stored once."""
        return tuple(count * width for count, width in zip(rows, self.row_nbytes, strict=True))

    def check_nbytes(self, rows: Sequence[int], nbytes: Sequence[int]) -> None:
        """Refuse bytes of a shard's columns that cannot have these rows.

        Raises:
            ValueError: a column whose rows are stored one after the other has another size.
        """
        plain = self.plain_nbytes(rows)
        for column, size in enumerate(nbytes if self.kind == "step" else ()):
            if size != plain[column] and column not in self.stored_once:
                raise ValueError(f"column {self.columns[column].name} has {size} bytes, must have {plain[column]}")

    @cached_property
    def axis_nbytes(self) -> tuple[int, ...]:
        """Bytes of one row of all columns on an axis, per axis; those on ``NEXT`` count as ``SAMPLES``."""
        total = [0] * Axis.NEXT
        for column, width in zip(self.columns, self.row_nbytes, strict=True):
            total[Axis.SAMPLES if column.axis is Axis.NEXT else column.axis] += width
        return tuple(total)

    @cached_property
    def has_valid(self) -> bool:
        """Whether these are step trajectories with a field ``valid``."""
        return self.kind == "step" and any(column.name == VALID for column in self.columns)

    @cached_property
    def observed_twice(self) -> tuple[str, ...]:
        """Names that observations before and after a step share (without ``curr_obs.``), smallest rows first."""
        both = [(self.row_nbytes[n], self.columns[n].name.removeprefix("curr_obs.")) for n in self.following.values()]
        return tuple(name for _, name in sorted(both))

    @cached_property
    def following(self) -> Mapping[int, int]:
        """Number of each column of ``next_obs``, and of the same observation in ``curr_obs``, without empty ones."""
        before = {
            (column.name.removeprefix("curr_obs."), column.dtype, column.row_shape): number
            for number, column in enumerate(self.columns)
            if column.name.startswith("curr_obs.") and column.axis is Axis.SAMPLES and self.row_nbytes[number]
        }
        after = {
            number: before.get((column.name.removeprefix("next_obs."), column.dtype, column.row_shape))
            for number, column in enumerate(self.columns)
            if column.name.startswith("next_obs.")
        }
        return {number: other for number, other in after.items() if other is not None}

    @cached_property
    def stored_once(self) -> Mapping[int, int]:
        """The part of :attr:`following` whose equal rows are stored once."""
        if self.kind == "agent":
            return {}
        return {n: before for n, before in self.following.items() if self.columns[n].axis is Axis.NEXT}

    @cached_property
    def layout(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Axis, and bytes of one row, of each column."""
        return np.array([column.axis for column in self.columns], np.int64), np.array(self.row_nbytes, np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {"kind": self.kind, "columns": [[c.name, c.dtype, list(c.row_shape), int(c.axis)] for c in self.columns]}

    @staticmethod
    def from_json(value: Any) -> Schema:
        """Parse the result of :meth:`to_json`.

        Raises:
            CorruptStoreError: ``value`` does not describe a schema.
        """
        try:
            kind = value["kind"]
            if kind not in ("step", "agent"):
                raise ValueError(f"kind {kind!r}")
            columns = []
            for name, dtype, row_shape, axis in value["columns"]:
                shape = tuple(int(n) for n in row_shape)
                if not isinstance(name, str) or any(n < 0 for n in shape) or dtype not in dtypes():
                    raise ValueError(f"column {name!r}")
                if Axis(axis) not in _AXES[kind] or (name == DOCUMENT) != (axis == Axis.DOCUMENT):
                    raise ValueError(f"column {name!r} on axis {axis}")
                columns.append(ColumnSpec(name, dtype, shape, Axis(axis)))
                if columns[-1].row_nbytes >= _MAX_ROW_NBYTES:
                    raise ValueError(f"column {name!r}")
            schema = Schema(kind, tuple(columns))
            for number, column in enumerate(columns):
                if column.axis is Axis.NEXT and number not in schema.stored_once:
                    raise ValueError(f"column {column.name!r} without the same one in curr_obs")
            return schema
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"not a trajectory schema: {error}") from error


class Extent(NamedTuple):
    """Number of rows of a trajectory on each axis.

    Attributes:
        steps: T of a step trajectory, L of an agent trajectory.
        batch: B of a step trajectory, 1 for an agent trajectory.
        extra: E of a step trajectory (0 without extra rows), R of an agent trajectory.
        document: bytes of the JSON document.
    """

    steps: int
    batch: int
    extra: int = 0
    document: int = 0

    def rows(self, axis: Axis) -> int:
        """Return the number of rows on ``axis``."""
        if axis in (Axis.SAMPLES, Axis.NEXT):
            return self.steps * self.batch
        if axis is Axis.RESPONSE:
            return self.extra
        if axis is Axis.DOCUMENT:
            return self.document
        return (self.steps + self.extra) * self.batch


def rows_on(extents: IntArray, axis: Axis) -> IntArray:
    """Return the number of rows on ``axis`` of each of several extents, ``[n, 4]``; see :meth:`Extent.rows`."""
    rows: IntArray
    if axis in (Axis.RESPONSE, Axis.DOCUMENT):
        rows = extents[:, 2 if axis is Axis.RESPONSE else 3]
    else:
        steps, batch, extra, _ = extents.T
        rows = (steps + extra) * batch if axis in (Axis.FIRST_EXTRA, Axis.LAST_EXTRA) else steps * batch
    return rows


_schemas: dict[tuple[Any, ...], Schema] = {}


def intern_schema(kind: Kind, columns: Sequence[tuple[str, torch.dtype, tuple[int, ...], Axis]]) -> Schema:
    """Return the only Schema object for these columns, so that equal schemas are identical in a process."""
    key = (kind, *columns)
    schema = _schemas.get(key)
    if schema is None:
        specs = tuple(ColumnSpec(name, _dtype_name(dtype), shape, axis) for name, dtype, shape, axis in columns)
        for spec, (name, dtype, _, _) in zip(specs, columns, strict=True):
            plain_name(shown(name), name)
            if spec.dtype not in dtypes():
                raise InvalidTrajectoryError(f"field {name}: dtype {dtype} cannot be stored")
        schema = _schemas.setdefault(key, Schema(kind, specs))
    return schema
