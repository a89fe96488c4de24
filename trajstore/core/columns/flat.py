"""Trajectories as columns, which every format stores, for any kind of trajectory. Pure; no I/O.

A :class:`FlatTrajectory` is one trajectory as contiguous CPU tensors, one per column of its
:class:`Schema`, plus an :class:`Extent` with the number of rows per axis. Text and numbers that
are not tensors are in one more column, ``_document``: the bytes of a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.memory import ALIGNMENT, Arena, Lease
from trajstore.core.columns.portions import portions
from trajstore.core.columns.schema import Extent, Schema


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Block:
    """Columns of trajectories of one schema in one piece of memory, consecutive per column as in a shard.

    Attributes:
        schema: the columns.
        lease: holds the memory.
        places: address of the first byte of each column, ``[trajectories, columns]``.
        sizes: bytes of each column, ``[trajectories, columns]``.
    """

    schema: Schema
    lease: Lease
    places: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Address of the first row of each column."""
        first: npt.NDArray[np.int64] = self.places[0]
        return first

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        """Return rows ``[start, stop)`` of a column of all trajectories, ``[stop - start, *row_shape]``, not copied."""
        spec, width = self.schema.columns[column], self.schema.row_nbytes[column]
        shape = (stop - start, *spec.row_shape)
        nbytes = (stop - start) * width
        if not nbytes:
            return torch.empty(shape, dtype=spec.torch_dtype)
        data = self.bytes_at(int(self.places[0, column]) + start * width, nbytes)
        return torch.frombuffer(data, dtype=torch.uint8).view(spec.torch_dtype).reshape(shape)

    def bytes_at(self, address: int, nbytes: int) -> memoryview:
        """Return bytes of the block, not copied."""
        start = address - self.lease.address
        return self.lease.data[start : start + nbytes]


@dataclass(slots=True, eq=False, repr=False)
class BlockTensors(Sequence[torch.Tensor]):
    """Columns of the only trajectory in a block of memory, made into tensors on access.

    Most trajectories are written without any access, and a tensor costs more than a small column's bytes.
    """

    block: Block
    extent: Extent

    def __len__(self) -> int:
        return len(self.block.schema.columns)

    def column_bytes(self, column: int) -> memoryview:
        """Return the bytes of a column, not copied."""
        block = self.block
        return block.bytes_at(int(block.places[0, column]), int(block.sizes[0, column]))

    @overload
    def __getitem__(self, at: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, at: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self.block.rows(at, 0, self.extent.rows(self.block.schema.columns[at].axis))


@dataclass(slots=True, eq=False)
class FlatTrajectory:
    """One trajectory as columns. Immutable by convention; enforcing that makes it five times as expensive.

    ``tensors[i]`` is contiguous, on the CPU, and holds ``extent.rows(axis) x row_shape`` values of
    ``schema.columns[i]``; its own shape may still be ``[T, B, ...]``.
    """

    schema: Schema
    extent: Extent
    tensors: Sequence[torch.Tensor]
    num_samples: int
    """Valid transitions of a step trajectory; 1 for a rollout."""
    max_episode_length: int
    model_weights_id: str
    versions: tuple[int, int] | None
    """Lowest and highest policy version; ``None`` if unknown."""
    facts: Mapping[str, Any] | None = None
    """Facts of a rollout, see :func:`~trajstore.core.columns.facts.facts_of`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.schema.nbytes(self.extent)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each column."""
        if isinstance(self.tensors, BlockTensors):
            sizes: list[int] = self.tensors.block.sizes[0].tolist()
            return sizes
        return [tensor.nbytes for tensor in self.tensors]

    @property
    def addresses(self) -> list[int]:
        """Address of each column's first byte, valid as long as this object; arbitrary for an empty column."""
        if isinstance(self.tensors, BlockTensors):
            addresses: list[int] = self.tensors.block.places[0].tolist()
            return addresses
        return [tensor.data_ptr() for tensor in self.tensors]

    def column_bytes(self, column: int) -> memoryview:
        """Return the bytes of a column, not copied."""
        if isinstance(self.tensors, BlockTensors):
            return self.tensors.column_bytes(column)
        return raw_bytes(self.tensors[column])


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying. Works for every dtype."""
    flat = tensor.reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


_FEW_BYTES = 4 << 20

_BLOCK_BYTES = 1 << 20
"""Size limit of a block of several trajectories: it stays as long as one of them is needed."""


def copied(flats: Sequence[FlatTrajectory], arena: Arena) -> list[Block]:
    """Copy trajectories to memory of the arena, in blocks of consecutive ones.

    The caller may then change or free their tensors.
    """
    return [
        _block_of(portion, arena)
        for _, run in groupby(flats, attrgetter("schema"))
        for portion, _ in portions(run, _BLOCK_BYTES, attrgetter("nbytes"))
    ]


def _block_of(flats: Sequence[FlatTrajectory], arena: Arena) -> Block:
    schema = flats[0].schema
    extents = np.array([flat.extent for flat in flats], np.int64)
    sources = np.array([flat.addresses for flat in flats], np.int64)
    sizes, targets = np.empty_like(sources), np.empty_like(sources)
    nbytes = kernels.lay_out(extents, *schema.layout, sizes, targets, ALIGNMENT)
    lease, offset = arena.take(nbytes)
    targets += lease.address + offset
    copy = kernels.copy_few_blocks if nbytes <= _FEW_BYTES else kernels.copy_blocks
    copy(targets.reshape(-1), sources.reshape(-1), sizes.reshape(-1))
    return Block(schema, lease, targets, sizes)
