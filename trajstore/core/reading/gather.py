"""Rows out of memory: allocate a batch and let the kernel fill it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base import locks
from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.limits import shown
from trajstore.core.columns.schema import ColumnSpec
from trajstore.core.reading.address_table import HeldRows
from trajstore.core.store.index import TrajectoryIndex
from trajstore.errors import ConfigurationError

_SPLIT_BYTES = 4 << 20
"""A batch below this is copied by the calling thread: handing over half of it would cost more."""

_PIECE_BYTES = 1 << 20
"""About how much a thread copies before it takes the next piece."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where the rows of n drawn samples are.

    Attributes:
        position: position of each sample's trajectory in the index, ``[n]``.
        slot: slot of each sample, ``[n]``.
        rows: row within the slot on each axis, ``[3, n]`` (axes as in :class:`~trajstore.core.columns.fields.Axis`).
    """

    position: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def of(self, samples: npt.NDArray[np.intp]) -> Located:
        """Return some of the samples."""
        return Located(self.position[samples], self.slot[samples], np.ascontiguousarray(self.rows[:, samples]))


def locate(samples: npt.NDArray[np.int64], index: TrajectoryIndex, first: int, end: int) -> Located:
    """Find the rows of samples, counted from the first sample of the window of positions ``[first, end)``."""
    count = len(samples)
    position, slot, rows = np.empty(count, np.int64), np.empty(count, np.int64), np.empty((3, count), np.int64)
    columns = index.by_position(index.table, "start_samples", "start_extra", "steps", "batch", "extra")
    kernels().locate_rows(samples, first, end, index.ends, *columns, position, slot, rows)
    return Located(position, slot, rows)


class Helpers:
    """Threads that share large copies with the caller; made on first use, anew in a forked child."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = locks.lock("Helpers._lock")

    def pool(self) -> ThreadPoolExecutor:
        """Return the pool of this process."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="trajstore-gather")
                self._pid = os.getpid()
            return self._pool


_helpers = Helpers(max(1, min(4, (os.cpu_count() or 1) - 1)))


def allocate(specs: Sequence[ColumnSpec], count: int, out: Mapping[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """Return a tensor ``[count, *row_shape]`` for each column, taken from ``out`` where it is given.

    Raises:
        ConfigurationError: a tensor in ``out`` is absent, too short, not contiguous, or of another dtype or shape.
    """
    if out is None:
        return [torch.empty((count, *spec.row_shape), dtype=spec.torch_dtype) for spec in specs]
    tensors = []
    for spec in specs:
        tensor = out.get(spec.name)
        if tensor is None:
            raise ConfigurationError(f"out has no tensor for column {spec.name}")
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ConfigurationError(f"out[{spec.name!r}]: {shown(tensor)} must be a tensor of rows")
        good = tensor.dtype == spec.torch_dtype and tuple(tensor.shape[1:]) == spec.row_shape
        if not good or tensor.shape[0] < count or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ConfigurationError(
                f"out[{spec.name!r}]: must be a contiguous CPU tensor {spec.dtype} "
                f"[>= {count}, {list(spec.row_shape)}], is {tensor.dtype} {list(tensor.shape)}"
            )
        tensors.append(tensor[:count])
    return tensors


def gather(
    located: Located,
    held: HeldRows,
    columns: npt.NDArray[np.int64],
    specs: Sequence[ColumnSpec],
    targets: Sequence[torch.Tensor],
) -> None:
    """Fill ``targets[j]`` with the rows of column ``columns[j]`` for all located samples, which are held.

    An interrupt ends this before the threads that help: they hold the rows and the targets as long as they copy.
    """
    copy_rows = kernels().copy_rows
    count = len(located.slot)
    widths = np.array([spec.row_nbytes for spec in specs], np.int64)
    bases = np.array([target.data_ptr() for target in targets], np.int64)
    arguments: tuple[Any, ...] = (located.slot, located.rows, held.first, held.axes, columns, widths, bases)
    nbytes = count * int(widths.sum())
    if nbytes < _SPLIT_BYTES or count < 2:
        copy_rows(*arguments, 0, count)
        return
    pieces = min(count, nbytes // _PIECE_BYTES)
    edges = [count * piece // pieces for piece in range(pieces + 1)]
    waiting = deque(pairwise(edges))

    def copy_pieces(_kept: object = (held, targets)) -> None:
        while True:
            try:
                begin, end = waiting.popleft()
            except IndexError:  # another thread took the last piece
                return
            copy_rows(*arguments, begin, end)

    others = [_helpers.pool().submit(copy_pieces) for _ in range(_helpers.threads)]
    copy_pieces()
    for other in others:
        if not other.cancel():  # one that has not begun yet, on a busy machine, is not waited for
            other.result()
