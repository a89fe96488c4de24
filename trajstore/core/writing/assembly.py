"""Builds the content of a shard from trajectories in memory, joining small pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.schema import Extent
from trajstore.core.files.base import Buffer
from trajstore.core.formats.base import ShardContent
from trajstore.core.writing.groups import Run

_JOIN_BELOW = 16 << 10
"""Pieces of a column that are smaller than this on average are joined, since each piece has a fixed cost."""


class Scratch:
    """Reusable memory of one writer thread."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def reset(self) -> None:
        """Allow all blocks to be reused."""
        self._used = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` bytes, uninitialised, until the next :meth:`reset`."""
        if self._used == len(self._blocks):
            self._blocks.append(np.empty(0, np.uint8))
        if len(self._blocks[self._used]) < nbytes:
            self._blocks[self._used] = np.empty(nbytes, np.uint8)
        self._used += 1
        return self._blocks[self._used - 1][:nbytes]


def content_of(runs: Sequence[Run], extents: npt.NDArray[np.int64], scratch: Scratch) -> ShardContent:
    """Return the content of a shard, its small columns joined in ``scratch``.

    Args:
        runs: its trajectories.
        extents: of all of them, ``[trajectories, 4]``.
        scratch: memory for the joined pieces.
    """
    addresses = np.array([run.block.places[run.first] for run in runs])
    sizes = np.array([run.block.sizes[run.first : run.first + len(run)].sum(axis=0) for run in runs])
    totals = sizes.sum(axis=0)
    small = (totals < len(runs) * _JOIN_BELOW) & (len(runs) > 1)
    joined = scratch.take(int(totals[small].sum()))
    sources, lengths = addresses.T[small].reshape(-1), sizes.T[small].reshape(-1)
    kernels.copy_blocks(np.cumsum(lengths) - lengths + joined.ctypes.data, sources, lengths)
    pieces: list[Sequence[Buffer]] = []
    position = 0
    view: Any = joined
    for column, nbytes in enumerate(totals.tolist()):
        if small[column]:
            pieces.append([memoryview(view)[position : position + nbytes]])
            position += nbytes
        else:
            starts, ends = addresses[:, column].tolist(), sizes[:, column].tolist()
            pieces.append([run.block.bytes_at(*place) for run, *place in zip(runs, starts, ends, strict=True)])
    return ShardContent(runs[0].block.schema, [Extent(*extent) for extent in extents.tolist()], pieces)
