"""Trajectories in private memory: what a buffer keeps between ``add_trajectories`` and the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.columns.memory import Arena, Lease, aligned
from trajstore.columns.record import BlockTensors, Record
from trajstore.columns.schema import Schema
from trajstore.machine_code import kernels

_FEW_BYTES = 4 << 20


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


def needed(record: Record) -> int:
    """Return the bytes that :func:`own` takes for a record."""
    return sum([aligned(tensor.nbytes) for tensor in record.tensors])


def own(records: Sequence[Record], arena: Arena) -> list[OwnedRecord]:
    """Return copies of records in memory of the arena; the caller may then change or free their tensors."""
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
    copy = kernels().copy_few_blocks if few else kernels().copy_blocks
    copy(addresses, np.array(sources, np.int64), lengths)
    owned = []
    start = 0
    for record, (lease, taken) in zip(records, blocks, strict=True):
        columns = slice(start, start + len(record.tensors))
        start = columns.stop
        block = BlockTensors(record.schema, record.extent, lease, addresses[columns])
        owned.append(OwnedRecord(record.with_tensors(block), lease.memory, addresses[columns], lengths[columns], taken))
    return owned
