"""Trajectories in private memory: what a buffer keeps between ``add_trajectories`` and the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trajstore.record import Record

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class OwnedRecord:
    """A record whose tensors lie in one block of memory of its own.

    Attributes:
        record: schema, extent and numbers; its tensors are views of ``block``.
        block: the memory.
        addresses: address of each column's first row.
        nbytes: bytes of the block.
    """

    record: Record
    block: torch.Tensor
    addresses: tuple[int, ...]
    nbytes: int


def block_nbytes(record: Record) -> int:
    """Return the bytes that :func:`own` will take for a record."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in record.tensors)


def own(record: Record) -> OwnedRecord:
    """Return a copy of a record in private memory; the caller may then change or free its tensors."""
    from trajstore._kernels import copy_blocks  # numba takes a while to import

    sizes = [tensor.nbytes for tensor in record.tensors]
    total = block_nbytes(record)
    block = torch.empty(total + _ALIGNMENT, dtype=torch.uint8)
    base = -(-block.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    addresses = []
    at = base
    for size in sizes:
        addresses.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    copy_blocks(
        np.array(addresses, np.int64),
        np.array([tensor.data_ptr() for tensor in record.tensors], np.int64),
        np.array(sizes, np.int64),
    )
    shift = base - block.data_ptr()
    tensors = _views(record, block, [address - base + shift for address in addresses])
    return OwnedRecord(replace(record, tensors=tensors), block, tuple(addresses), total)


def _views(record: Record, block: torch.Tensor, offsets: Sequence[int]) -> tuple[torch.Tensor, ...]:
    storage = block.untyped_storage()
    views = []
    for tensor, offset in zip(record.tensors, offsets, strict=True):
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(storage, offset // tensor.dtype.itemsize, tensor.shape)  # type: ignore[call-overload]
        views.append(view)
    return tuple(views)
