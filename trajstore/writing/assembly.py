"""The content of a shard made of trajectories in memory, small pieces joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.columns.owned import OwnedTrajectory
from trajstore.files.base import Buffer
from trajstore.formats.base import ShardContent
from trajstore.machine_code import kernels

_JOIN_BELOW = 64 << 10
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
    flats = [item.flat for item in owned]
    if len(flats) == 1:
        return ShardContent.of(flats)
    schema = flats[0].schema
    shape = (len(owned), len(schema.columns))
    sizes = np.concatenate([item.sizes for item in owned]).reshape(shape).T
    sources = np.concatenate([item.addresses for item in owned]).reshape(shape).T
    totals = sizes.sum(axis=1)
    small = totals < len(owned) * _JOIN_BELOW
    targets = np.cumsum(sizes[small]) - sizes[small].reshape(-1)
    joined = scratch.take(int(totals[small].sum()))
    kernels().copy_blocks(targets + joined.ctypes.data, sources[small].reshape(-1), sizes[small].reshape(-1))
    pieces: list[Sequence[Buffer]] = []
    position = 0
    view: Any = joined
    for column, nbytes in enumerate(totals.tolist()):
        if small[column]:
            pieces.append([memoryview(view)[position : position + nbytes]])
            position += nbytes
        else:
            pieces.append([flat.column_bytes(column) for flat in flats])
    return ShardContent(schema, [flat.extent for flat in flats], pieces)
