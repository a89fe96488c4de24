"""Trajectories in private memory: what a buffer keeps between ``add_trajectories`` and the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.columns.flat import BlockTensors, FlatTrajectory
from trajstore.columns.memory import Arena, Lease, aligned
from trajstore.columns.schema import Schema
from trajstore.machine_code import kernels

_FEW_BYTES = 4 << 20


@dataclass(slots=True)
class OwnedTrajectory:
    """A flat trajectory whose tensors lie in one block of memory of its own.

    Attributes:
        flat: schema, extent and numbers; its columns are views of ``memory``.
        memory: what holds the block.
        addresses: address of each column's first row, ``[columns]``.
        sizes: bytes of each column, ``[columns]``.
        nbytes: bytes of the block.
    """

    flat: FlatTrajectory
    memory: npt.NDArray[np.uint8]
    addresses: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    nbytes: int

    @property
    def schema(self) -> Schema:
        """Columns of the trajectory."""
        return self.flat.schema


def needed(flat: FlatTrajectory) -> int:
    """Return the bytes that :func:`copied` takes for a trajectory."""
    return sum([aligned(size) for size in flat.sizes])


def copied(flats: Sequence[FlatTrajectory], arena: Arena) -> list[OwnedTrajectory]:
    """Return copies of trajectories in memory of the arena; the caller may then change or free their tensors."""
    blocks: list[tuple[Lease, int]] = []
    targets: list[int] = []
    sources: list[int] = []
    sizes: list[int] = []
    for flat in flats:
        nbytes = flat.sizes
        taken = sum([aligned(size) for size in nbytes])
        lease, offset = arena.take(taken)
        blocks.append((lease, taken))
        sources += flat.addresses
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
    for flat, (lease, taken) in zip(flats, blocks, strict=True):
        columns = slice(start, start + len(flat.tensors))
        start = columns.stop
        block = BlockTensors(flat.schema, flat.extent, lease, addresses[columns], lengths[columns])
        owned.append(
            OwnedTrajectory(flat.with_tensors(block), lease.memory, addresses[columns], lengths[columns], taken)
        )
    return owned
