"""Trajectories in private memory: what a buffer keeps between ``add_trajectories`` and the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.arena import Arena, Lease, aligned
from trajstore.formats.base import Buffer, ShardContent
from trajstore.record import BlockTensors, Record
from trajstore.schema import Schema

_FEW_BYTES = 4 << 20

_JOIN_BELOW = 64 << 10
"""Pieces of a column that are smaller than this, on average, are joined: a piece costs more than its bytes."""


@dataclass(slots=True)
class OwnedRecord:
    """A record whose tensors lie in one block of memory of its own.

    Attributes:
        record: schema, extent and numbers; its columns are views of ``memory``.
        memory: what holds the block.
        addresses: address of each column's first row, ``[columns]``.
        sizes: bytes of each column, ``[columns]``.
        nbytes: bytes of the block.
    """

    record: Record
    memory: npt.NDArray[np.uint8]
    addresses: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    nbytes: int

    @property
    def schema(self) -> Schema:
        """Columns of the record."""
        return self.record.schema


def groups(records: Sequence[Record], limit: int) -> Iterator[tuple[list[Record], int]]:
    """Split a list so that each part, if it has more than one record, needs at most ``limit`` bytes; yield both."""
    group: list[Record] = []
    total = 0
    for record in records:
        nbytes = sum([aligned(tensor.nbytes) for tensor in record.tensors])
        if group and total + nbytes > limit:
            yield group, total
            group, total = [], 0
        group.append(record)
        total += nbytes
    if group:
        yield group, total


def own(records: Sequence[Record], arena: Arena) -> list[OwnedRecord]:
    """Return copies of records in memory of the arena; the caller may then change or free their tensors."""
    from trajstore._kernels import copy_blocks, copy_few_blocks  # numba takes a while to import

    blocks: list[tuple[Lease, int]] = []
    targets: list[int] = []
    sources: list[int] = []
    sizes: list[int] = []
    for record in records:
        nbytes = [tensor.nbytes for tensor in record.tensors]
        taken = sum([aligned(size) for size in nbytes])
        lease, offset = arena.take(taken)
        blocks.append((lease, taken))
        sources += [tensor.data_ptr() for tensor in record.tensors]
        sizes += nbytes
        address = lease.address + offset
        for size in nbytes:
            targets.append(address)
            address += aligned(size)
    addresses, lengths = np.array(targets, np.int64), np.array(sizes, np.int64)
    few = sum(sizes) <= _FEW_BYTES
    (copy_few_blocks if few else copy_blocks)(addresses, np.array(sources, np.int64), lengths)
    owned = []
    start = 0
    for record, (lease, taken) in zip(records, blocks, strict=True):
        columns = slice(start, start + len(record.tensors))
        start = columns.stop
        block = BlockTensors(record.schema, record.extent, lease, addresses[columns])
        owned.append(OwnedRecord(record.with_tensors(block), lease.memory, addresses[columns], lengths[columns], taken))
    return owned


class Scratch:
    """One thread's memory for what it is writing just now."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def reset(self) -> None:
        """Take back what was given."""
        self._used = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` bytes, uninitialised, until the next :meth:`reset`."""
        if self._used == len(self._blocks):
            self._blocks.append(np.empty(0, np.uint8))
        if len(self._blocks[self._used]) < nbytes:
            self._blocks[self._used] = np.empty(nbytes, np.uint8)
        self._used += 1
        return self._blocks[self._used - 1][:nbytes]


def content_of(owned: Sequence[OwnedRecord], scratch: Scratch) -> ShardContent:
    """Return the content of a shard, its small columns joined in ``scratch``."""
    from trajstore._kernels import copy_blocks

    records = [item.record for item in owned]
    if len(records) == 1:
        return ShardContent.of(records)
    schema = records[0].schema
    shape = (len(owned), len(schema.columns))
    sizes = np.concatenate([item.sizes for item in owned]).reshape(shape).T
    sources = np.concatenate([item.addresses for item in owned]).reshape(shape).T
    totals = sizes.sum(axis=1)
    small = totals < len(owned) * _JOIN_BELOW
    targets = np.cumsum(sizes[small]) - sizes[small].reshape(-1)
    joined = scratch.take(int(totals[small].sum()))
    copy_blocks(targets + joined.ctypes.data, sources[small].reshape(-1), sizes[small].reshape(-1))
    pieces: list[Sequence[Buffer]] = []
    position = 0
    view: Any = joined
    for column, nbytes in enumerate(totals.tolist()):
        if small[column]:
            pieces.append([memoryview(view)[position : position + nbytes]])
            position += nbytes
        else:
            pieces.append([record.column_bytes(column) for record in records])
    return ShardContent(schema, [record.extent for record in records], pieces)
