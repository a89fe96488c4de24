"""Whole columns of trajectories: planned with ``Contents.lock``, copied without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.machine_code import kernels
from trajstore._core.base.machine_code import packing_kernels as packing
from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import DOCUMENT, ColumnSpec, Extent, Schema
from trajstore._core.reading.address_table import AddressTable
from trajstore._core.reading.agreement import agree, in_words
from trajstore._core.reading.late_rows import LateColumn
from trajstore._core.reading.plan import HeldRows
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.row_location import START_OF

_NO_DOCUMENT = ColumnSpec(DOCUMENT, "uint8", (), Axis.DOCUMENT)
"""Placeholder for an absent document: no rows, at address 0."""


@dataclass(frozen=True, slots=True)
class Run:
    """One column of n trajectories.

    Attributes:
        specs: variants of the column; dtypes and axes may differ.
        which: index of each trajectory's variant in ``specs``, ``[n]``.
        sources: address of each trajectory's first row, ``[n]``; of packed columns of their description.
        counts: number of rows of each trajectory, ``[n]``.
        starts: first row of each trajectory in packed columns, ``[n]``; -1 in others.
        keep: additional memory that some of the rows are in.
    """

    specs: list[ColumnSpec]
    which: npt.NDArray[np.intp]
    sources: IntArray
    counts: IntArray
    starts: IntArray
    keep: torch.Tensor | None = None

    @property
    def sizes(self) -> IntArray:
        """Bytes of each trajectory's rows, ``[n]``."""
        widths = [spec.row_nbytes for spec in self.specs]
        sizes: IntArray = self.counts * (widths[0] if len(widths) == 1 else np.array(widths, np.int64)[self.which])
        return sizes

    def pieces(self) -> tuple[IntArray, IntArray]:
        """Return address and size in bytes of pieces of the rows: of each trajectory's, or packed ones."""
        inside = self.starts >= 0
        if not inside.any():
            return self.sources, self.sizes
        ends = self.starts + self.counts
        each = zip(self.sources[inside].tolist(), self.starts[inside].tolist(), ends[inside].tolist(), strict=True)
        stored = np.concatenate([packing.pieces_of(*place) for place in each])
        outside = np.stack([self.sources, self.sizes], axis=1)[~inside]
        addresses, sizes = np.ascontiguousarray(np.concatenate([stored, outside]).T)
        return addresses, sizes

    def copy(self, begins: IntArray, total: int) -> torch.Tensor:
        """Return one tensor ``[total, *row_shape]``, zero where no trajectory has a row.

        Args:
            begins: target row of each trajectory's first row, ``[n]``.
            total: rows of the tensor.
        """
        if len(begins) and (begins.min() < 0 or (begins + self.counts).max() > total):
            raise ValueError(f"starts: a trajectory lies outside the {total} places")
        dtypes, shape = [spec.torch_dtype for spec in self.specs], self.specs[0].row_shape
        wanted = reduce(torch.promote_types, dtypes)
        target = torch.zeros((total, *shape), dtype=wanted)
        targets = target.data_ptr() + begins * (prod(shape) * wanted.itemsize)
        same = np.array([dtype == wanted for dtype in dtypes], np.bool_)[self.which]
        self._put(targets, same, wanted.itemsize)
        for at in np.flatnonzero(~same).tolist():
            converted = torch.empty((int(self.counts[at]), *shape), dtype=dtypes[self.which[at]])
            alone = np.arange(len(same)) == at
            self._put(np.full(len(same), converted.data_ptr()), alone, converted.itemsize)
            target[int(begins[at]) : int(begins[at] + self.counts[at])] = converted
        return target

    def _put(self, targets: IntArray, chosen: npt.NDArray[np.bool_], itemsize: int) -> None:
        """Copy the rows of some trajectories to addresses."""
        inside = chosen & (self.starts >= 0)
        if inside.any():
            rows = (self.sources[inside], self.starts[inside], self.counts[inside])
            packing.unpack_rows(targets[inside], *rows, itemsize)
            chosen = chosen & ~inside
        kernels.copy_blocks(targets[chosen], self.sources[chosen], self.sizes[chosen])


class RunPlan(HeldRows):
    """The copy of whole columns of trajectories; copied any number of times, then :meth:`end`.

    Attributes:
        columns: by name.
    """

    __slots__ = ("columns",)

    def __init__(self, table: AddressTable, slots: IntArray) -> None:
        super().__init__(table, slots)
        self.columns: dict[str, Run] = {}

    def pieces(self) -> tuple[IntArray, IntArray]:
        """Return address and size in bytes of the pieces of all runs."""
        none = np.zeros(0, np.int64)
        pieces = [(none, none), *(run.pieces() for run in self.columns.values())]
        return np.concatenate([addresses for addresses, _ in pieces]), np.concatenate([sizes for _, sizes in pieces])


def plan_runs(
    table: AddressTable,
    index: TrajectoryIndex,
    positions: IntArray,
    slots: IntArray,
    names: Sequence[str] | None,
    given: Sequence[LateColumn] = (),
) -> RunPlan:
    """Plan the copy of columns of trajectories; with ``Contents.lock`` held.

    Args:
        table: address table of the rows.
        index: index of the trajectories.
        positions: positions of the trajectories, ``[n]``.
        slots: their resident slots, ``[n]``.
        names: columns to copy; None = all, which all trajectories must then have. A document may be absent.
        given: late per-row columns, whose slots are resident.

    Raises:
        SchemaMismatchError: a trajectory lacks a column, or has another shape of it.
    """
    late_slots = [column_rows.slots[column_rows.slots >= 0] for column_rows in given]
    plan = RunPlan(table, np.concatenate([slots, *late_slots]))
    kinds: list[Schema] = []
    kind_of: dict[int, int] = {}  # by identity: few objects, even for many slots
    of_slot: dict[int, int] = {}
    for slot in dict.fromkeys(slots.tolist()):
        schema = table.schema(slot)
        if id(schema) not in kind_of:
            if schema not in kinds:
                kinds.append(schema)
            kind_of[id(schema)] = kinds.index(schema)
        of_slot[slot] = kind_of[id(schema)]
    kind_numbers = np.array(list(map(of_slot.__getitem__, slots.tolist())), np.intp)

    def who(at: Sequence[int]) -> str:
        return in_words(index.at("trajectory_id", positions[np.isin(kind_numbers, at)]))

    if len(kinds) == 1 and names is None:
        taken = [column.name for column in kinds[0].columns if column.name != DOCUMENT]
    else:
        plain = [[column for column in schema.columns if column.name != DOCUMENT] for schema in kinds]
        asked = None if names is None else [name for name in dict.fromkeys(names) if name != DOCUMENT]
        agreed = agree(plain, asked, who, "", "name the columns to read")
        taken = [plain[0][place].name for place in agreed[0]] if plain else []
    if names is None or DOCUMENT in names:
        taken = [*taken, DOCUMENT]
    for name in taken if kinds else ():
        zeros = np.zeros((3, len(slots)), np.int64)
        plan.columns[name] = Run([_NO_DOCUMENT] * len(kinds), kind_numbers, zeros[0], zeros[1], zeros[2] - 1)
    extents = Extent(*(index.at(name, positions).astype(np.int64) for name in Extent._fields))
    on_axis: dict[Axis, tuple[Any, Any]] = {}
    packed = table.packed[slots]
    for kind, schema in enumerate(kinds):
        mine: Any = slice(None) if len(kinds) == 1 else kind_numbers == kind
        first = plan.first[slots[mine]][:, table.columns.of(schema).numbers]
        for place, spec in enumerate(schema.columns):
            run = plan.columns.get(spec.name)
            if run is None:
                continue
            if spec.axis not in on_axis:
                on_axis[spec.axis] = index.at(START_OF[spec.axis], positions), extents.rows(spec.axis)
            starts, counts = on_axis[spec.axis]
            run.specs[kind] = spec
            run.sources[mine] = first[:, place] + np.where(packed[mine], 0, starts[mine] * schema.row_nbytes[place])
            run.counts[mine] = counts[mine]
            run.starts[mine] = np.where(packed[mine], starts[mine], -1)
    for column_rows in given:
        plan.columns[column_rows.name] = _late_run(table, plan, column_rows, extents.rows(column_rows.column.axis))
    return plan


def _late_run(table: AddressTable, plan: RunPlan, given: LateColumn, counts: Any) -> Run:
    """Return a late per-row column; NaN for trajectories without values."""
    column, slots = given.column, given.slots
    sources, starts, keep = np.zeros(len(slots), np.int64), np.full(len(slots), -1), None
    for slot in np.unique(slots[slots >= 0]).tolist():
        here = slots == slot
        sources[here] = plan.first[slot, table.number_of(slot, column)]
        if table.packed[slot]:
            starts[here] = given.starts[here]
        else:
            sources[here] += given.starts[here] * column.row_nbytes
    lacking = slots < 0
    if lacking.any():
        rows = int(counts[lacking].max())
        keep = torch.full((rows, *column.row_shape), float("nan"), dtype=column.torch_dtype)
        sources[lacking] = keep.data_ptr()
    return Run([column], np.zeros(len(slots), np.intp), sources, counts, starts, keep)
