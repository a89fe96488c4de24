"""Trajectories in private memory: what a buffer keeps between ``add_trajectories`` and the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.record import BlockTensors, Record

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class OwnedRecord:
    """A record whose tensors lie in one block of memory of its own.

    Attributes:
        record: schema, extent and numbers; its columns are views of ``block``.
        block: the memory.
        addresses: address of each column's first row.
        nbytes: bytes of the block.
    """

    record: Record
    block: npt.NDArray[np.uint8]
    addresses: Sequence[int]
    nbytes: int


def block_nbytes(record: Record) -> int:
    """Return the bytes that :func:`own` will take for a record."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in record.tensors)


def own(record: Record) -> OwnedRecord:
    """Return a copy of a record in private memory; the caller may then change or free its tensors."""
    from trajstore._kernels import copy_blocks  # numba takes a while to import

    sizes = [tensor.nbytes for tensor in record.tensors]
    offsets = []
    total = 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    block = np.empty(total + _ALIGNMENT, np.uint8)
    start = block.ctypes.data
    shift = -start % _ALIGNMENT
    addresses = [start + shift + offset for offset in offsets]
    copy_blocks(
        np.array(addresses, np.int64),
        np.array([tensor.data_ptr() for tensor in record.tensors], np.int64),
        np.array(sizes, np.int64),
    )
    data: Any = block
    columns = BlockTensors(record.schema, record.extent, memoryview(data)[shift:], offsets)
    return OwnedRecord(replace(record, tensors=columns), block, addresses, total)
