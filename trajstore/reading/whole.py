"""One whole trajectory, read from wherever it is now."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from trajstore.columns.schema import Schema
from trajstore.files.partial import fetched
from trajstore.reading.residency import HeldRows, Residency
from trajstore.reading.shard_access import rows_of
from trajstore.reading.sources import Source
from trajstore.store.index import TrajectoryIndex


def rows_at(
    index: TrajectoryIndex, residency: Residency, sources: Sequence[Source], position: int
) -> tuple[Schema, list[torch.Tensor]]:
    """Return the columns of the trajectory at a position, copied or decoded; with ``Contents.lock`` held.

    Each has ``[rows, *row_shape]``. Extra rows and document are noted in the index where only the file tells them.

    Raises:
        CorruptStoreError: a file is missing or damaged.
    """
    slot = int(index.at("slot", position))
    undecoded = residency.ensure(np.array([slot], np.int64), lambda _, extent: index.note_extent(position, extent))
    extent = index.entry(position).extent
    home = index.home(position)
    if undecoded:
        source, row = residency.shard_of(slot)
        schema = sources[source].manifest(row).schema
        told = sources[source].extent(row)
        if told is not None:
            extent = told
            index.note_extent(position, told)
        return schema, rows_of(sources[source].reader(row), schema, extent, home)
    schema = residency.schema(slot)
    tensors = [
        torch.empty((extent.rows(column.axis), *column.row_shape), dtype=column.torch_dtype)
        for column in schema.columns
    ]
    held = HeldRows(residency, np.array([slot], np.int64))
    addresses = [
        base + home.first(column.axis) * column.row_nbytes
        for column, base in zip(schema.columns, held.addresses_of(slot), strict=True)
    ]
    sizes = [tensor.nbytes for tensor in tensors]
    with fetched(held.partial, lambda: (np.array(addresses, np.int64), np.array(sizes, np.int64))):
        for tensor, address in zip(tensors, addresses, strict=True):
            if tensor.nbytes:
                ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
    held.let_go()
    return schema, tensors
