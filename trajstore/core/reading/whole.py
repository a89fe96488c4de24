"""One whole trajectory, read from wherever it is now."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from trajstore.core.columns.schema import ColumnSpec, Extent, Schema
from trajstore.core.files.partial import fetched
from trajstore.core.reading.address_table import AddressTable, HeldRows
from trajstore.core.reading.late_rows import column_named, homes_of, make_resident
from trajstore.core.reading.shard_access import rows_of
from trajstore.core.reading.sources import Source
from trajstore.core.store.index import TrajectoryIndex


def rows_at(
    index: TrajectoryIndex, addresses: AddressTable, sources: Sequence[Source], position: int
) -> tuple[Schema, list[torch.Tensor]]:
    """Return the columns of the trajectory at a position, copied or decoded; with ``Contents.lock`` held.

    Each has ``[rows, *row_shape]``. Extra rows and document are noted in the index where only the file tells them.

    Raises:
        CorruptStoreError: a file is missing or damaged.
    """
    slot = int(index.at("slot", position))
    undecoded = addresses.ensure(np.array([slot], np.int64), lambda _, extent: index.note_extent(position, extent))
    extent = index.extent(position)
    location = index.location(position)
    if undecoded:
        source, row = addresses.shard_of(slot)
        schema = sources[source].manifest(row).schema
        told = sources[source].extent(row)
        if told is not None:
            extent = told
            index.note_extent(position, told)
        return schema, rows_of(sources[source].reader(row), schema, extent, location)
    schema = addresses.schema(slot)
    held = HeldRows(addresses, np.array([slot], np.int64))
    begins = [
        base + location.first(column.axis) * column.row_nbytes
        for column, base in zip(schema.columns, held.addresses_of(slot), strict=True)
    ]
    return schema, _copied(held, schema.columns, begins, extent)


def whole_rows(
    index: TrajectoryIndex, addresses: AddressTable, sources: Sequence[Source], position: int
) -> dict[str, torch.Tensor]:
    """Return all values by row of the trajectory at a position, by name: ``[T, B, ...]`` or ``[L]`` or ``[R]``.

    Raises:
        CorruptStoreError: a file is missing or damaged.
    """
    found = {}
    extent = index.extent(position)
    for name in index.row_notes:
        slots, starts = homes_of(index, np.array([position], np.int64), name)
        slot = int(slots[0])
        if slot < 0:
            continue
        make_resident(addresses, sources, slots)
        schema = addresses.schema(slot)
        column = column_named(schema, name)
        held = HeldRows(addresses, slots)
        address = held.address_of(slot, column) + int(starts[0]) * column.row_nbytes
        (tensor,) = _copied(held, [column], [address], extent)
        steps = (extent.steps, extent.batch) if schema.kind == "step" else (extent.rows(column.axis),)
        found[name] = tensor.reshape(*steps, *column.row_shape)
    return found


def _copied(
    held: HeldRows, columns: Sequence[ColumnSpec], addresses: Sequence[int], extent: Extent
) -> list[torch.Tensor]:
    """Return the rows of some columns that begin at these addresses, and let go of them."""
    tensors = [torch.empty((extent.rows(one.axis), *one.row_shape), dtype=one.torch_dtype) for one in columns]
    sizes = [tensor.nbytes for tensor in tensors]
    with fetched(held.partial, lambda: (np.array(addresses, np.int64), np.array(sizes, np.int64))):
        for tensor, address in zip(tensors, addresses, strict=True):
            if tensor.nbytes:
                ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
    held.let_go()
    return tensors
