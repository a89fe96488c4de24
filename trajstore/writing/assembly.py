"""The content of a shard made of trajectories in memory, small pieces joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.columns.flat import Block
from trajstore.columns.owned import OwnedTrajectory
from trajstore.files.base import Buffer
from trajstore.formats.base import ShardContent
from trajstore.machine_code import kernels

_JOIN_BELOW = 16 << 10
"""Pieces of a column that are smaller than this, on average, are joined: a piece costs more than its bytes."""


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


def content_of(owned: Sequence[OwnedTrajectory], scratch: Scratch) -> ShardContent:
    """Return the content of a shard, its small columns joined in ``scratch``."""
    schema = owned[0].schema
    runs = _runs(owned)
    addresses = np.array([block.addresses[first] for block, first, _ in runs])
    sizes = np.array([block.sizes[first:stop].sum(axis=0) for block, first, stop in runs])
    totals = sizes.sum(axis=0)
    small = (totals < len(runs) * _JOIN_BELOW) & (len(runs) > 1)
    joined = scratch.take(int(totals[small].sum()))
    sources, lengths = addresses.T[small].reshape(-1), sizes.T[small].reshape(-1)
    kernels().copy_blocks(np.cumsum(lengths) - lengths + joined.ctypes.data, sources, lengths)
    pieces: list[Sequence[Buffer]] = []
    position = 0
    view: Any = joined
    for column, nbytes in enumerate(totals.tolist()):
        if small[column]:
            pieces.append([memoryview(view)[position : position + nbytes]])
            position += nbytes
        else:
            starts, ends = addresses[:, column].tolist(), sizes[:, column].tolist()
            pieces.append([run[0].bytes_at(*place) for run, *place in zip(runs, starts, ends, strict=True)])
    return ShardContent(schema, [item.extent for item in owned], pieces)


def _runs(owned: Sequence[OwnedTrajectory]) -> list[tuple[Block, int, int]]:
    """Return the runs of trajectories that follow each other in a block: the block, the first one, the end."""
    runs: list[tuple[Block, int, int]] = []
    block, first, stop = owned[0].tensors.block, owned[0].tensors.at, owned[0].tensors.at
    for item in owned:
        there = item.tensors
        if there.block is not block or there.at != stop:
            runs.append((block, first, stop))
            block, first = there.block, there.at
        stop = there.at + 1
    return [*runs, (block, first, stop)]
