"""Observations that are stored once: ``next_obs`` of a step and ``curr_obs`` of the step after it. Pure; no I/O.

A column on ``Axis.NEXT`` begins with a table of one little-endian int64 per sample of the shard, in whole rows.
``n >= 0`` is row n of the column in ``curr_obs``; ``-1 - n`` is row n of the column's own rows, which follow the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.machine_code import kernels
from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import raw_bytes
from trajstore._core.columns.schema import Schema, intern_schema
from trajstore._core.files.base import Buffer
from trajstore._core.formats.base import ShardContent, ShardManifest, ShardReader, rows_from_bytes
from trajstore.errors import CorruptStoreError

LEAST_BYTES = 64
"""Bytes of the smallest rows to be stored once: a row of the table has 8."""


def could_be_stored_once(schema: Schema) -> list[int]:
    """Return the columns whose rows are all stored, although they are large enough to be stored once.

    Bytes of a table are no valid values of ``bool``.
    """
    return [
        number
        for number in schema.following
        if number not in schema.stored_once
        and schema.row_nbytes[number] >= LEAST_BYTES
        and schema.columns[number].dtype != "bool"
    ]


def folded(content: ShardContent, *, search: bool) -> ShardContent:
    """Return the content with the rows that a shard has of its columns on ``Axis.NEXT``.

    Args:
        content: all rows of all columns.
        search: put further columns on that axis if this saves bytes.
    """
    schema, pieces = content.schema, list(content.pieces)
    once = set(schema.stored_once)
    chosen = [*schema.stored_once, *(could_be_stored_once(schema) if search else ())]
    if not chosen:
        return content
    steps, batch, *_ = content.extents.T
    counts = steps * batch
    after = np.arange(counts.sum()) + np.repeat(batch, counts)  # row of the same environment's next step
    compared = np.flatnonzero(after < np.repeat(np.cumsum(counts), counts))
    for number in chosen:
        width = schema.row_nbytes[number]
        rows, before = (_addresses(pieces[column], width) for column in (number, schema.following[number]))
        equal = np.zeros(len(compared), np.bool_)
        kernels.equal_rows(rows[compared], before[after[compared]], width, equal)
        own = np.ones(len(rows), np.bool_)
        own[compared[equal]] = False
        head = _table_rows(len(rows), width)
        kept = rows[own]
        if number not in once and head + len(kept) >= len(rows):
            continue
        data = np.zeros((head + len(kept)) * width, np.uint8)
        table = data[: 8 * len(rows)].view("<i8")
        table[:] = after
        table[own] = -1 - np.arange(len(kept))
        targets = data.ctypes.data + np.arange(head, head + len(kept)) * width
        kernels.copy_blocks(targets, kept, np.full(len(kept), width))
        pieces[number] = [data.data]
        once.add(number)
    axes = [Axis.NEXT if number in once else column.axis for number, column in enumerate(schema.columns)]
    specs = [(c.name, c.torch_dtype, c.row_shape, axis) for c, axis in zip(schema.columns, axes, strict=True)]
    return ShardContent(intern_schema(schema.kind, specs), content.extents, pieces, content.entries)


def _addresses(pieces: Sequence[Buffer], width: int) -> IntArray:
    """Return the address of each row of consecutive pieces."""
    parts = [np.frombuffer(piece, np.uint8) for piece in pieces if memoryview(piece).nbytes]
    return np.concatenate([part.ctypes.data + np.arange(0, len(part), width) for part in parts])


def _table_rows(samples: int, width: int) -> int:
    """Return the number of rows that a table fills."""
    return -(-8 * samples // width)


def row_addresses(manifest: ShardManifest, column: int, table: Buffer, own: int, before: int) -> IntArray:
    """Return the address of each row of a column that is stored once.

    Args:
        manifest: of the shard.
        column: number of the column.
        table: its table.
        own: address of the column, and so of its table.
        before: address of the column in ``curr_obs``.

    Raises:
        CorruptStoreError: the table names rows that do not exist.
    """
    width, samples = manifest.schema.row_nbytes[column], manifest.rows[column]
    numbers = _checked(manifest, column, table)
    first = own + _table_rows(samples, width) * width
    return np.where(numbers < 0, first - (numbers + 1) * width, before + numbers * width)


def table_nbytes(manifest: ShardManifest, column: int) -> int:
    """Return the bytes of a column's table.

    Raises:
        CorruptStoreError: the column is too short for its table.
    """
    samples, width = manifest.rows[column], manifest.schema.row_nbytes[column]
    if (nbytes := manifest.nbytes[column]) < _table_rows(samples, width) * width:
        raise CorruptStoreError(f"{_named(manifest, column)}: has {nbytes} bytes, too few for its table")
    return 8 * samples


def _checked(manifest: ShardManifest, column: int, table: Buffer) -> IntArray:
    samples, width = manifest.rows[column], manifest.schema.row_nbytes[column]
    numbers = np.frombuffer(table, "<i8", samples)
    own = manifest.nbytes[column] // width - _table_rows(samples, width)
    if samples and (numbers.min() < -own or numbers.max() >= samples):
        raise CorruptStoreError(f"{_named(manifest, column)}: its table names rows that do not exist")
    return numbers


def _named(manifest: ShardManifest, column: int) -> str:
    return f"{manifest.files[0].name}: column {manifest.schema.columns[column].name}"


class FramesReader(ShardReader):
    """Reads a shard with columns that are stored once.

    Args:
        shard: reads the shard's own rows.
        manifest: of the shard.
    """

    def __init__(self, shard: ShardReader, manifest: ShardManifest) -> None:
        self._shard = shard
        self._manifest = manifest
        self._tables: dict[int, IntArray] = {}

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        schema = self._manifest.schema
        if column not in schema.stored_once:
            return self._shard.rows(column, start, stop)
        numbers = self._table(column)[start:stop]
        head = _table_rows(self._manifest.rows[column], schema.row_nbytes[column])
        target = np.empty((len(numbers), schema.row_nbytes[column]), np.uint8)
        own = numbers < 0
        target[own] = self._at(column, head - 1 - numbers[own])
        target[~own] = self._at(schema.stored_once[column], numbers[~own])
        spec = schema.columns[column]
        return rows_from_bytes(target.data, spec.torch_dtype, (len(numbers), *spec.row_shape))

    def _at(self, column: int, rows: IntArray) -> npt.NDArray[np.uint8]:
        """Return the bytes of rows that the shard has, ``[rows, bytes]``."""
        width = self._manifest.schema.row_nbytes[column]
        if not len(rows):
            return np.empty((0, width), np.uint8)
        first, last = int(rows.min()), int(rows.max())
        data = raw_bytes(self._shard.rows(column, first, last + 1))
        return np.frombuffer(data, np.uint8).reshape(-1, width)[rows - first]

    def once(self, column: int, start: int, stop: int, before: int) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return rows of one trajectory without those in ``curr_obs``, and the address of each row.

        Args:
            column: a column that is stored once.
            start: first row of the trajectory.
            stop: end of its rows.
            before: address of row ``start`` of the column in ``curr_obs``.

        Raises:
            CorruptStoreError: the table names a row of another trajectory.
        """
        numbers = self._table(column)[start:stop]
        own, width = numbers < 0, self._manifest.schema.row_nbytes[column]
        if not ((start <= numbers[~own]) & (numbers[~own] < stop)).all():
            raise CorruptStoreError(f"{_named(self._manifest, column)}: its table names rows of another trajectory")
        rows = self._at(column, _table_rows(self._manifest.rows[column], width) - 1 - numbers[own])
        addresses = before + (numbers - start) * width
        addresses[own] = rows.ctypes.data + np.arange(len(rows)) * width
        return rows, addresses

    def _table(self, column: int) -> IntArray:
        if column not in self._tables:
            nbytes, width = table_nbytes(self._manifest, column), self._manifest.schema.row_nbytes[column]
            rows = self._shard.rows(column, 0, -(-nbytes // width))
            self._tables[column] = _checked(self._manifest, column, raw_bytes(rows.contiguous()))
        return self._tables[column]
