"""Trajectories as columns, which every format stores, for any kind of trajectory. Pure; no I/O.

A :class:`FlatTrajectory` is one trajectory as contiguous CPU tensors, one per column of its
:class:`Schema`, plus an :class:`Extent` with the number of rows per axis. Text and numbers that
are not tensors are in one more column, ``_document``: the bytes of a JSON object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.machine_code import kernels
from trajstore._core.columns.facts import facts_to_json
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.columns.memory import ALIGNMENT, Arena, Lease, aligned
from trajstore._core.columns.schema import Extent, Schema


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
    """Facts of a rollout, see :func:`~trajstore._core.columns.facts.facts_of`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.schema.nbytes(self.extent)

    def column_bytes(self, column: int) -> memoryview:
        """Return the bytes of a column, not copied."""
        return raw_bytes(self.tensors[column])


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying. Works for every dtype."""
    flat = tensor.reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    if flat.stride(0) != 1:  # of a single element, which counts as contiguous
        flat = flat.as_strided((flat.numel(),), (1,))
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


NUMBERS = (
    *("num_samples", "steps", "batch", "extra", "document", "nbytes"),
    *("max_episode_length", "version_low", "version_high"),
)
"""Columns of :attr:`FlatTrajectories.numbers`; unknown versions are ``UNKNOWN_VERSION``."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FlatTrajectories:
    """Consecutive trajectories of one schema, without an object for each. Immutable by convention.

    Attributes:
        schema: the columns.
        numbers: :data:`NUMBERS` of each, ``[trajectories, 9]``.
        weights: ``model_weights_id`` of each.
        facts: facts by name, one value per rollout, ``None`` where it has none; None for step trajectories.
        addresses: address of each column's first byte, ``[trajectories, columns]``; arbitrary for an empty column.
        owner: keeps the memory of the columns.
    """

    schema: Schema
    numbers: npt.NDArray[np.int64]
    weights: Sequence[str]
    facts: Mapping[str, Sequence[Any]] | None
    addresses: npt.NDArray[np.int64]
    owner: Any

    @staticmethod
    def runs(flats: Iterable[FlatTrajectory]) -> list[FlatTrajectories]:
        """Return trajectories as runs of one schema each."""
        return [FlatTrajectories._of(list(run)) for _, run in groupby(flats, attrgetter("schema"))]

    @staticmethod
    def _of(flats: Sequence[FlatTrajectory]) -> FlatTrajectories:
        schema, unknown = flats[0].schema, (UNKNOWN_VERSION, UNKNOWN_VERSION)
        numbers = [
            (flat.num_samples, *flat.extent, flat.nbytes, flat.max_episode_length, *(flat.versions or unknown))
            for flat in flats
        ]
        addresses = np.array([[tensor.data_ptr() for tensor in flat.tensors] for flat in flats], np.int64)
        return FlatTrajectories(
            schema,
            np.array(numbers, np.int64),
            [flat.model_weights_id for flat in flats],
            None if schema.kind == "step" else facts_to_json([flat.facts or {} for flat in flats]),
            addresses.reshape(len(flats), len(schema.columns)),
            flats,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> FlatTrajectories:
        facts = None if self.facts is None else {name: values[part] for name, values in self.facts.items()}
        return FlatTrajectories(
            self.schema, self.numbers[part], self.weights[part], facts, self.addresses[part], self.owner
        )

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """Steps, batch, extra rows and bytes of the document, ``[trajectories, 4]``."""
        return np.ascontiguousarray(self.numbers[:, 1:5])


def cut(runs: Iterable[FlatTrajectories], limit: int) -> Iterator[tuple[list[FlatTrajectories], int]]:
    """Yield consecutive trajectories with at most ``limit`` bytes, or a single larger one; and their bytes."""
    piece: list[FlatTrajectories] = []
    total = 0
    for run in runs:
        ends, start, before = np.cumsum(run.numbers[:, 5]), 0, 0
        while start < len(run):
            stop = int(np.searchsorted(ends, before + limit - total, "right"))
            if stop <= start and piece:
                yield piece, total
                piece, total = [], 0
                continue
            stop = max(stop, start + 1)
            piece.append(run if stop - start == len(run) else run[start:stop])
            total += int(ends[stop - 1]) - before
            start, before = stop, int(ends[stop - 1])
    if piece:
        yield piece, total


Copied = tuple[FlatTrajectories, Block]
"""Trajectories and their copies."""

_FEW_BYTES = 4 << 20

_BLOCK_BYTES = 1 << 20
"""Size limit of a block of several trajectories: it stays as long as one of them is needed."""


def copied(runs: Iterable[FlatTrajectories], arena: Arena) -> list[Copied]:
    """Copy trajectories to memory of the arena, in blocks of consecutive ones.

    The caller may then change or free their tensors.
    """
    return [(part, copied_together([part], arena)[0][0]) for run in runs for (part,), _ in cut([run], _BLOCK_BYTES)]


def copied_together(runs: Sequence[FlatTrajectories], arena: Arena) -> tuple[list[Block], npt.NDArray[np.uint8]]:
    """Copy trajectories to one piece of memory, and return a block for each run, and the memory."""
    layouts, end = [], 0
    for run in runs:
        sizes, places = np.empty_like(run.addresses), np.empty_like(run.addresses)
        nbytes = lay_out(run, sizes, places)
        places += end
        layouts.append((sizes, places))
        end = aligned(end + nbytes)
    lease, offset = arena.take(end)
    blocks = []
    copy = kernels.copy_few_blocks if end <= _FEW_BYTES else kernels.copy_blocks
    for run, (sizes, places) in zip(runs, layouts, strict=True):
        places += lease.address + offset
        copy(places.reshape(-1), run.addresses.reshape(-1), sizes.reshape(-1))
        blocks.append(Block(run.schema, lease, places, sizes))
    return blocks, lease.memory[offset : offset + end]


def lay_out(run: FlatTrajectories, sizes: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> int:
    """Lay trajectories out as in a block; return its bytes, and set sizes and offsets of their columns."""
    nbytes: int = kernels.lay_out(run.extents, *run.schema.layout, sizes, places, ALIGNMENT)
    return nbytes
