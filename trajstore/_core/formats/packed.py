"""Packed columns of rollouts: each row in few bytes, and rows that repeat once. Pure; no I/O.

In a shard of rollouts each column is one block: a head of four little-endian int64 (runs, stored rows, their width,
bytes of a number of the table), where the runs end, where they come from, the stored rows. A run that ends at n has
the rows of the column from the end of the run before up to n. If its source s is not negative, these are the stored
rows from s on; else all are the stored row -1 - s. A width is in bytes, negative for signed integers, 0 for a bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.machine_code import packing_kernels as kernels
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import ColumnSpec, Schema
from trajstore._core.files.base import Buffer
from trajstore._core.formats.base import ShardContent, ShardManifest, ShardReader
from trajstore.errors import CorruptStoreError

IntArray = npt.NDArray[np.int64]

HEAD_BYTES = 32

_REPEATED_BYTES, _REPEATED_BITS = 24, 192
"""Shortest sequence of equal rows that is stored as one row, which may take two more runs of 8 bytes."""


def is_packed(schema: Schema) -> bool:
    """Return whether the columns of a shard are packed: those of rollouts are, in every format."""
    return schema.kind == "agent"


def packed(content: ShardContent) -> ShardContent:
    """Return the content of a shard of rollouts with its columns packed."""
    tokens, _, response, document = content.extents.T
    counts_on = {Axis.SAMPLES: tokens, Axis.RESPONSE: response, Axis.DOCUMENT: document}
    blocks = []
    for spec, pieces in zip(content.schema.columns, content.pieces, strict=True):
        counts = np.ascontiguousarray(counts_on[spec.axis])
        blocks.append(_block(spec, _addresses(pieces, counts * spec.row_nbytes), counts))
    return ShardContent(content.schema, content.extents, blocks, content.entries)


def _addresses(pieces: Sequence[Buffer], sizes: IntArray) -> IntArray:
    """Return the address of each trajectory's bytes; pieces hold whole trajectories, one after the other."""
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces if memoryview(piece).nbytes]
    lengths = np.array([len(array) for array in arrays], np.int64)
    begins, starts = np.cumsum(lengths) - lengths, np.cumsum(sizes) - sizes
    if not len(arrays):
        return np.zeros(len(sizes), np.int64)
    bases = np.array([array.ctypes.data for array in arrays], np.int64)
    at = np.searchsorted(begins, starts, side="right") - 1
    addresses: IntArray = bases[at] + starts - begins[at]
    return addresses


def _block(spec: ColumnSpec, addresses: IntArray, counts: IntArray) -> list[Buffer]:
    dtype, itemsize = spec.torch_dtype, spec.row_nbytes
    is_text = spec.axis is Axis.DOCUMENT
    is_number = not (dtype.is_floating_point or dtype.is_complex or is_text)
    width = itemsize
    if is_number:
        signed = dtype.is_signed and itemsize < 8
        low, high = kernels.range_of_values(addresses, counts, -itemsize if signed else itemsize)
        width = _narrowest(low, high, itemsize)
    order = np.arange(len(counts))
    if (is_number and width != kernels.BITS) or is_text:
        places = zip(addresses.tolist(), (counts * itemsize).tolist(), strict=True)
        texts = [ctypes.string_at(*place) for place in places]
        order = np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)
    least = -(-_REPEATED_BYTES // abs(width)) if width else _REPEATED_BITS
    rows, stored, ends, sources = kernels.pack_rows(addresses, counts, order, itemsize, width, 0 if is_text else least)
    size = 4 if counts.sum() < 1 << 31 else 8
    head = np.array([len(ends), stored, width, size], "<i8")
    table = ends.astype(f"<u{size}"), sources.astype(f"<i{size}")
    parts: list[Any] = [array.view(np.uint8) for array in (head, *table, rows) if len(array)]
    return [memoryview(part) for part in parts]


def stored_width(block: Sequence[Buffer]) -> int:
    """Return the bytes of a stored row of a block of :func:`packed`; 0 for bits."""
    return abs(int(np.frombuffer(block[0], "<i8", 4)[2]))


def _narrowest(low: int, high: int, itemsize: int) -> int:
    """Return the width of integers from ``low`` to ``high``."""
    if low >= 0 and high <= 1:
        return 0
    for width in range(1, min(itemsize, 5)):
        if low >= 0 and high < 1 << 8 * width:
            return width
        if -(1 << 8 * width - 1) <= low < 0 and high < 1 << 8 * width - 1:
            return -width
    return itemsize


def table_nbytes(manifest: ShardManifest, column: int, head: bytes) -> int:
    """Return the bytes of a block's head and table.

    Raises:
        CorruptStoreError: its bytes are not those of the runs and rows that its head says.
    """
    spec, nbytes = manifest.schema.columns[column], manifest.nbytes[column]
    if len(head) == HEAD_BYTES:
        runs, stored, width, size = np.frombuffer(head, "<i8").tolist()
        if runs >= 0 and stored >= 0 and size in (4, 8) and _is_width(width, spec):
            table: int = HEAD_BYTES + 2 * runs * size
            if table + (stored * abs(width) if width else -(-stored // 8)) == nbytes:
                return table
    raise CorruptStoreError(f"{_named(manifest, column)}: its head does not fit its {nbytes:,} bytes")


def _is_width(width: int, spec: ColumnSpec) -> bool:
    dtype, itemsize = spec.torch_dtype, spec.row_nbytes
    is_number = not (dtype.is_floating_point or dtype.is_complex)
    return width == itemsize or (is_number and (width == 0 or 0 < abs(width) < min(itemsize, 5)))


def description(manifest: ShardManifest, column: int, block: int, table: int) -> IntArray:
    """Return the description of a block that the kernels read.

    Args:
        manifest: of the shard.
        column: number of the column.
        block: its address.
        table: address of its head and table, checked by :func:`table_nbytes`, or of a copy of them.

    Raises:
        CorruptStoreError: its runs name rows that do not exist.
    """
    runs, stored, width, size = np.frombuffer(ctypes.string_at(table, HEAD_BYTES), "<i8").tolist()
    ends, sources = table + HEAD_BYTES, table + HEAD_BYTES + runs * size
    if not kernels.is_sound(ends, sources, runs, size, manifest.rows[column], stored):
        raise CorruptStoreError(f"{_named(manifest, column)}: its table names rows that do not exist")
    rows = block + HEAD_BYTES + 2 * runs * size
    return np.array([rows, runs, ends, sources, size, width], np.int64)


def _named(manifest: ShardManifest, column: int) -> str:
    return f"{manifest.files[0].name}: column {manifest.schema.columns[column].name}"


class PackedReader(ShardReader):
    """Reads a shard whose columns are packed.

    Args:
        shard: reads the shard's blocks.
        manifest: of the shard.
    """

    def __init__(self, shard: ShardReader, manifest: ShardManifest) -> None:
        self._shard = shard
        self._manifest = manifest
        self._blocks: dict[int, tuple[IntArray, torch.Tensor]] = {}

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        spec = self._manifest.schema.columns[column]
        at, _ = self._block(column)  # first: the index may claim more rows than any memory has
        target = torch.empty((stop - start, *spec.row_shape), dtype=spec.torch_dtype)
        places = ([number] for number in (target.data_ptr(), at.ctypes.data, start, stop - start))
        kernels.unpack_rows(*(np.array(place, np.int64) for place in places), spec.row_nbytes)
        return target

    def _block(self, column: int) -> tuple[IntArray, torch.Tensor]:
        if column not in self._blocks:
            block = self._shard.rows(column, 0, self._manifest.nbytes[column]).contiguous()
            table_nbytes(self._manifest, column, bytes(block[:HEAD_BYTES].numpy()))
            self._blocks[column] = description(self._manifest, column, *[block.data_ptr()] * 2), block
        return self._blocks[column]
