"""Late values by row: an advantage per token, a label per step. Pure; no I/O.

They are stored in a separate shard, named by their log record. Its columns have the names of the values, and its
trajectories are those that received values, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import raw_bytes
from trajstore._core.columns.limits import MAX_ID
from trajstore._core.columns.schema import ColumnSpec, Extent, Kind, Schema, dtypes, intern_schema
from trajstore._core.formats.base import ShardContent, ShardManifest
from trajstore._core.store.additions import check_rows, starts_of
from trajstore._core.store.log_records import integers, manifest_from_json, manifest_to_json, natural
from trajstore._core.store.row_location import START_OF
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, CorruptStoreError, trajectories

Rows = Mapping[str, Sequence[torch.Tensor]]
"""Values by row, by name: a tensor for each trajectory."""

_KIND = "rows"
"""Prefix of kinds that are rows."""

_AXES: Mapping[Kind, tuple[Axis, ...]] = {"step": (Axis.SAMPLES,), "agent": (Axis.SAMPLES, Axis.RESPONSE)}


@dataclass(frozen=True, slots=True, eq=False)
class RowShard:
    """A durable shard of values by row.

    Attributes:
        number: of the shard.
        manifest: of the shard; its columns have the names of the values.
        extents: of the trajectories that receive values, in order, ``[n, 4]``.
    """

    number: int
    manifest: ShardManifest
    extents: IntArray

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of rows, by name."""
        return {column.name: kind_of_rows(column) for column in self.manifest.schema.columns}

    def starts(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return the first row of each trajectory, by name."""
        starts = starts_of(self.extents, self.manifest.schema.kind)
        return {column.name: starts[START_OF[column.axis]] for column in self.manifest.schema.columns}

    def to_json(self, schemas: Sequence[Any], schema: int) -> dict[str, Any]:
        """Return the shard as JSON for a record.

        Args:
            schemas: new schemas of the store, as JSON values.
            schema: number of the shard's schema.
        """
        return {
            "number": self.number,
            "schemas": schemas,
            "shard": manifest_to_json(self.manifest, schema),
            "extents": np.ascontiguousarray(self.extents[:, :3]),
        }

    @staticmethod
    def from_json(value: Any, schemas: Sequence[Schema], count: int) -> RowShard:
        """Return the shard described by :meth:`to_json`.

        Args:
            value: JSON from a record.
            schemas: of the store, including the new ones in ``value``.
            count: of trajectories.

        Raises:
            CorruptStoreError: it does not describe values of ``count`` trajectories.
            KeyError, TypeError, ValueError: values are absent or of the wrong kind.
        """
        manifest = manifest_from_json(value["shard"], schemas)
        extents = np.pad(integers(value["extents"], 3), ((0, 0), (0, 1)))
        if len(extents) != count:
            raise CorruptStoreError(f"rows of {trajectories(len(extents))}, but {count} ids")
        for column in manifest.schema.columns:
            if column.axis not in _AXES[manifest.schema.kind]:
                raise CorruptStoreError(f"values {column.name}: on axis {int(column.axis)}")
        check_rows(extents, manifest)
        return RowShard(natural(value["number"], MAX_ID // 2), manifest, extents)


def kind_of_rows(column: ColumnSpec) -> str:
    """Return the kind of a column's rows: ``"rows float32 [3] 0"``."""
    return f"{_KIND} {column.dtype} {list(column.row_shape)} {int(column.axis)}"


def is_rows(kind: str) -> bool:
    """Return whether a kind is rows."""
    return kind.startswith(f"{_KIND} ")


def is_kind_of_rows(kind: str) -> bool:
    """Return whether this is a valid result of :func:`kind_of_rows`."""
    try:
        column = column_of_kind("", kind)
    except (ValueError, IndexError):
        return False
    return column.dtype in dtypes() and kind_of_rows(column) == kind


def column_of_kind(name: str, kind: str) -> ColumnSpec:
    """Return the column of rows of a kind; inverse of :func:`kind_of_rows`."""
    _, dtype, rest = kind.split(" ", 2)
    shape, _, axis = rest.rpartition(" ")
    sizes = shape.removeprefix("[").removesuffix("]")
    return ColumnSpec(name, dtype, tuple(int(size) for size in sizes.split(",") if size.strip()), Axis(int(axis)))


def rows_in_words(kind: str) -> str:
    """Return a kind of rows for a message: ``"rows of float32 [3]"``."""
    column = column_of_kind("", kind)
    per = " per response token" if column.axis is Axis.RESPONSE else ""
    return f"rows of {column.dtype}{list(column.row_shape) if column.row_shape else ''}{per}"


def content_of_rows(
    given: Rows, ids: IntArray, extents: IntArray, kinds: Sequence[Kind], known: Mapping[str, str]
) -> ShardContent:
    """Return the content of a shard of values by row.

    Args:
        given: the values.
        ids: of the trajectories.
        extents: of each, ``[n, 4]``, without documents.
        kinds: of each.
        known: kinds of the store's names.

    Raises:
        ConfigurationError: rows do not fit their trajectory, or differ in dtype or shape; names it.
    """
    for at, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigurationError(
                f"annotate: trajectory {shown_id(ids[at])} is {_article(kind)}, trajectory {shown_id(ids[0])} is "
                f"{_article(kinds[0])}: annotate each kind in its own call"
            )
    columns, pieces = [], []
    each = [Extent(*extent) for extent in extents.tolist()]
    for name, tensors in given.items():
        shape, axis = _shape_of(name, tensors, ids, each, kinds[0], known.get(name))
        columns.append((name, tensors[0].dtype, shape, axis))
        pieces.append([raw_bytes(tensor) for tensor in tensors])
    return ShardContent(intern_schema(kinds[0], columns), extents, pieces)


def _article(kind: Kind) -> str:
    return "a block of steps" if kind == "step" else "a rollout"


def _shape_of(
    name: str, tensors: Sequence[torch.Tensor], ids: IntArray, extents: Sequence[Extent], kind: Kind, known: str | None
) -> tuple[tuple[int, ...], Axis]:
    """Return row shape and axis of the values of trajectories of one kind.

    Raises:
        ConfigurationError: the values do not fit.
    """
    first = tensors[0]
    if first.dtype not in dtypes().values():
        raise ConfigurationError(f"annotate: {name}: dtype {first.dtype} cannot be stored")
    lead = 2 if kind == "step" else 1
    axes = _AXES[kind]
    if known is not None and is_rows(known):
        axes = tuple(axis for axis in axes if axis is column_of_kind(name, known).axis) or axes
    for number, tensor, extent in zip(ids, tensors, extents, strict=True):
        dimensions = tuple(tensor.shape)
        if tensor.dtype != first.dtype or dimensions[lead:] != tuple(first.shape[lead:]):
            raise ConfigurationError(
                f"annotate: {name}: trajectory {shown_id(number)} has rows of {_words(tensor, lead)}, trajectory "
                f"{shown_id(ids[0])} of {_words(first, lead)}: rows of a name have one dtype and shape"
            )
        expected = {axis: _leading(kind, extent, axis) for axis in axes}
        axes = tuple(axis for axis in axes if dimensions[:lead] == expected[axis])
        if not axes:
            shapes = " or ".join(dict.fromkeys(str([*shape, "..."]).replace("'", "") for shape in expected.values()))
            raise ConfigurationError(
                f"annotate: {name}: rows of trajectory {shown_id(number)} have the shape {list(dimensions)}, must have "
                f"{shapes}: a row for each {'step and environment' if kind == 'step' else 'token'}"
            )
    shape = tuple(first.shape[lead:])
    if kind == "agent" and shape:
        raise ConfigurationError(
            f"annotate: {name}: has rows of {_words(first, lead)}, must have one number for each token"
        )
    return shape, axes[0]


def _leading(kind: Kind, extent: Extent, axis: Axis) -> tuple[int, ...]:
    return (extent.steps, extent.batch) if kind == "step" else (extent.rows(axis),)


def _words(tensor: torch.Tensor, lead: int) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[lead:])}"
