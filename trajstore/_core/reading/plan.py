"""Row copies: planned with ``Contents.lock`` held, executed without it.

A plan holds the addresses of the rows, and the memory they are in.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.base.machine_code import kernels
from trajstore._core.base.types import IntArray
from trajstore._core.columns.limits import shown
from trajstore._core.columns.schema import ColumnSpec
from trajstore._core.files.partial import fetched
from trajstore._core.reading.address_table import UNAVAILABLE, AddressTable
from trajstore._core.reading.agreement import agree, in_words
from trajstore._core.reading.column_interner import ColumnSet
from trajstore._core.store.index import TrajectoryIndex
from trajstore.errors import ConfigurationError, SchemaMismatchError

logger = logging.getLogger(__name__)


_SPLIT_BYTES = 4 << 20
"""Smaller batches are copied by the calling thread; sharing the work would cost more."""

_PIECE_BYTES = 256 << 10
"""Approximate bytes that a thread copies at a time."""

_BYTES_PER_HELPER = 1 << 20
"""Waking a thread takes about as long as copying this."""

_WAKES = 2
"""Helpers that each thread wakes before it copies."""

_helpers: dict[str, IntArray] = {}
"""The ``record`` of this process's helper threads, once they are started."""

os.register_at_fork(after_in_child=_helpers.clear)


class HeldRows:
    """Rows of resident slots; their memory stays valid until :meth:`end`.

    Args:
        table: address table of the slots.
        slots: slots to read.

    Attributes:
        first: address of each column's first row, ``[slots, columns]``; for slots resident at creation.
        axes: axis of each column in each slot, ``[slots, columns]``.
        once: numbers of the columns that are on ``Axis.NEXT`` in some slot.
        partial: files whose rows must be fetched before reading.
    """

    __slots__ = ("__weakref__", "_table", "axes", "first", "once", "partial")

    def __init__(self, table: AddressTable, slots: IntArray) -> None:
        self._table = table
        self.first = table.first
        self.axes = table.axes
        self.once = table.once
        self.partial = table.partial_maps(slots) if table.partial else ()
        table.copies.begin(self)

    def end(self) -> None:
        """Release the rows. Dropping the object does so too, with a delay."""
        self._table.copies.end(self)

    def fetched(self, pieces: Callable[[], tuple[IntArray, IntArray]]) -> AbstractContextManager[None]:
        """Return a context in which rows are readable; ``pieces`` returns their addresses and sizes in bytes."""
        return fetched(self.partial, pieces) if self.partial else nullcontext()


class Late(Protocol):
    """A late column of a batch."""

    @property
    def spec(self) -> ColumnSpec:
        """Spec of the column."""

    def fill(self, target: torch.Tensor) -> None:
        """Write the column into a tensor ``[n, *row_shape]``."""


class RowPlan(HeldRows):
    """The copy of a batch of rows, executed by :meth:`read`.

    Args:
        table: address table of the rows.
        slots: resident slot of each row, ``[n]``.
        places: row within the slot on each axis, ``[3, n]``.
        columns: columns of the batch.
        parts: if dtypes differ: groups of batch rows with equal columns, and their columns in the order of ``columns``.
        late: late columns, stored in no shard or in another one.
    """

    __slots__ = ("_columns", "_late", "_parts", "_places", "_slots")

    def __init__(
        self,
        table: AddressTable,
        slots: IntArray,
        places: IntArray,
        columns: ColumnSet,
        parts: Sequence[tuple[npt.NDArray[np.intp], ColumnSet]] = (),
        late: Sequence[Late] = (),
    ) -> None:
        super().__init__(table, slots)
        self._slots, self._places, self._columns, self._parts, self._late = slots, places, columns, parts, late

    def read(self, out: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return the rows by dotted column name; callable once, without ``Contents.lock``.

        Raises:
            ConfigurationError: a tensor of ``out`` does not fit.
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        targets = allocate(self._columns, len(self._slots), out)
        result = {spec.name: target for spec, target in zip(self._columns.specs, targets, strict=True)}
        if self._late:
            late = allocate(ColumnSet([late_column.spec for late_column in self._late]), len(self._slots), out)
        with self.fetched(self._pieces):
            if not self._parts:
                self._gather(self._slots, self._places, self._columns, targets)
            for at, columns in self._parts:
                converted = allocate(columns, len(at), None)
                self._gather(self._slots[at], np.ascontiguousarray(self._places[:, at]), columns, converted)
                for target, tensor in zip(targets, converted, strict=True):
                    put_rows(target, at, tensor.to(target.dtype))
        self.end()
        for column in self._late:
            target = late.pop(0)
            column.fill(target)
            result[column.spec.name] = target
        return result

    def _gather(self, slots: IntArray, places: IntArray, columns: ColumnSet, targets: Sequence[torch.Tensor]) -> None:
        """Fill ``targets[j]`` with the rows of column j."""
        count, width = len(slots), int(columns.widths.sum())
        bases = np.array([target.data_ptr() for target in targets], np.int64)
        rows = (slots, places, self.first, self.axes, columns.numbers)
        if self.once and not self.once.isdisjoint(columns.numbers.tolist()):  # each row begins a slot of its own
            sources = np.empty((len(columns.numbers), count), np.int64)
            kernels.row_addresses(*rows, columns.widths, sources)
            addresses = np.ascontiguousarray(sources.T)
            axes = np.zeros(addresses.shape, np.int8)
            rows = (np.arange(count), np.zeros_like(places), addresses, axes, np.arange(len(sources)))
        arguments = (*rows, columns.widths, bases)
        if count * width < _SPLIT_BYTES or count < 2:
            kernels.copy_rows(*arguments, 0, count, np.empty(count, np.int64))
            return
        piece = min(max(1, _PIECE_BYTES // width), kernels.MOST_SAMPLES)
        kernels.share_rows(*arguments, piece, count * width // _BYTES_PER_HELPER, _WAKES, _helper_record())

    def _pieces(self) -> tuple[IntArray, IntArray]:
        """Return address and size in bytes of every row to copy."""
        addresses, sizes = [], []
        for at, columns in self._parts or [(np.arange(len(self._slots)), self._columns)]:
            slots, places = self._slots[at], np.ascontiguousarray(self._places[:, at])
            sources = np.empty((len(columns.specs), len(slots)), np.int64)
            kernels.row_addresses(slots, places, self.first, self.axes, columns.numbers, columns.widths, sources)
            addresses.append(sources.reshape(-1))
            sizes.append(np.repeat(columns.widths, len(slots)))
        return np.concatenate(addresses), np.concatenate(sizes)


def put_rows(target: torch.Tensor, at: npt.NDArray[np.intp], rows: torch.Tensor) -> None:
    """Copy row i of ``rows`` to row ``at[i]`` of ``target``, both contiguous; torch cannot for some dtypes (uint16)."""
    width = rows.nbytes // max(1, len(rows))
    sources = rows.data_ptr() + np.arange(len(at)) * width
    kernels.copy_blocks(target.data_ptr() + at * width, sources, np.full(len(at), width))


def allocate(columns: ColumnSet, count: int, out: Mapping[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """Return a tensor ``[count, *row_shape]`` per column, taken from ``out`` where given.

    Raises:
        ConfigurationError: a tensor in ``out`` is absent, too short, not contiguous, or of another dtype or shape.
    """
    if out is None:
        return [
            torch.empty((count, *spec.row_shape), dtype=dtype)
            for spec, dtype in zip(columns.specs, columns.dtypes, strict=True)
        ]
    tensors = []
    for spec, dtype in zip(columns.specs, columns.dtypes, strict=True):
        tensor = out.get(spec.name)
        if tensor is None:
            raise ConfigurationError(f"out has no tensor for column {spec.name}")
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ConfigurationError(f"out[{spec.name!r}]: {shown(tensor)} must be a tensor of rows")
        good = tensor.dtype == dtype and tuple(tensor.shape[1:]) == spec.row_shape
        if not good or tensor.shape[0] < count or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ConfigurationError(
                f"out[{spec.name!r}]: must be a contiguous CPU tensor {spec.dtype} "
                f"[>= {count}, {list(spec.row_shape)}], is {tensor.dtype} {list(tensor.shape)}"
            )
        tensors.append(tensor[:count])
    return tensors


def _helper_count() -> int:
    """Return the number of helper threads to start."""
    return min(len(os.sched_getaffinity(0)) - 1, max(4, torch.get_num_threads() - 1), 15)


def _helper_record() -> IntArray:
    """Return the record of this process's helper threads; the first call starts them."""
    record = _helpers.get("record")
    if record is None:
        made = np.zeros(kernels.HELPERS_NUMBERS, np.int64)
        kernels.make_helpers(made)
        record = _helpers.setdefault("record", made)
        if record is made:
            uninterrupted(lambda: _start_helpers(made))
    return record


def _start_helpers(record: IntArray) -> None:
    with suppress(RuntimeError):  # the interpreter is exiting, or the system is out of threads: fewer help
        for _ in range(_helper_count()):
            threading.Thread(target=kernels.help_copy, args=(record,), name="trajstore-gather", daemon=True).start()
            record[kernels.HELPERS] += 1


class BatchColumns:
    """Chooses the columns of batches. Guarded by ``Contents.lock``.

    Args:
        table: address table with the columns of all slots.
    """

    def __init__(self, table: AddressTable) -> None:
        self._table = table
        self._undecoded: tuple[int, int | None] = (UNAVAILABLE, None)
        self._warned: set[tuple[int, int]] = set()

    def choose(
        self, index: TrajectoryIndex, positions: IntArray, slots: IntArray, oldest: int, names: Sequence[str] | None
    ) -> tuple[ColumnSet, list[tuple[npt.NDArray[np.intp], ColumnSet]]]:
        """Return the columns of a batch, and groups of rows with other dtypes (empty if all agree).

        Args:
            index: index of the trajectories.
            positions: position of each row's trajectory, ``[n]``.
            slots: their resident slots, ``[n]``.
            oldest: position of the window's oldest trajectory, whose dtypes the batch takes.
            names: columns to take; None takes all, which must then be equal.

        Raises:
            SchemaMismatchError: the columns differ, or the trajectories are agent trajectories.
        """
        of_each, interner = self._table.signature[slots], self._table.columns
        like = self._signature_at(index, oldest, slots)
        if names is None and len(slots) and (of_each == of_each[0]).all():
            kind, columns = interner.sampled[int(of_each[0])]
            if kind == "step" and like in (None, of_each[0]):
                return columns, []
        signatures = np.unique(of_each).tolist()
        sampled = [interner.sampled[signature] for signature in signatures]
        if any(kind == "agent" for kind, _ in sampled):
            raise SchemaMismatchError(
                "sample() draws single steps, and this window has agent trajectories, which can only be drawn whole: "
                "use sample_trajectories(count), or read one with get(trajectory_id)"
            )

        def who(at: Sequence[int]) -> str:
            theirs = np.isin(of_each, [signatures[number] for number in at])
            return in_words(index.at("trajectory_id", positions[theirs]))

        specs, kinds = interner.specs, [columns.numbers.tolist() for _, columns in sampled]
        column_places = agree([[specs[number] for number in kind] for kind in kinds], names, who)
        numbers = [[kind[place] for place in places] for kind, places in zip(kinds, column_places, strict=True)]
        dtypes = {} if like is None else {specs[n].name: n for n in interner.sampled[like][1].numbers.tolist()}
        wanted = []
        for number in numbers[0] if numbers else ():
            oldest_number = dtypes.get(specs[number].name, number)
            wanted.append(oldest_number if specs[oldest_number].row_shape == specs[number].row_shape else number)
        if all(row_numbers == wanted for row_numbers in numbers):
            return interner.set_of(wanted), []
        self._warn_of_casts(numbers, wanted)
        parts = [
            (np.flatnonzero(of_each == signature), interner.set_of(row_numbers))
            for signature, row_numbers in zip(signatures, numbers, strict=True)
        ]
        return interner.set_of(wanted), parts

    def _signature_at(self, index: TrajectoryIndex, position: int, needed: IntArray) -> int | None:
        """Return the signature of the trajectory at a position, or None if unreadable. Needed slots stay resident."""
        if not index.first <= position < index.end:
            return None
        slot, table = int(index.at("slot", position)), self._table
        if slot == UNAVAILABLE:
            return None
        known = int(table.signature[slot])
        if known >= 0 or self._undecoded[0] == slot:
            return known if known >= 0 else self._undecoded[1]
        # The needed slots are resident, so only this one can turn out to have extra rows.
        if table.ensure(np.append(needed, slot), lambda _, extent: index.fill_extent(position, extent)):
            self._undecoded = slot, table.columns.of(table.schema(slot)).signature
            return self._undecoded[1]
        return int(table.signature[slot])

    def _warn_of_casts(self, numbers: Sequence[Sequence[int]], wanted: Sequence[int]) -> None:
        specs = self._table.columns.specs
        for pair in dict.fromkeys(pair for row_numbers in numbers for pair in zip(row_numbers, wanted, strict=True)):
            if pair[0] != pair[1] and pair not in self._warned:
                self._warned.add(pair)
                logger.warning(
                    "column %s: %s rows are cast to %s, the dtype of the window's oldest trajectory",
                    specs[pair[0]].name,
                    specs[pair[0]].dtype,
                    specs[pair[1]].dtype,
                )
