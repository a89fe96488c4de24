"""Late per-row values on reading; each is stored in a shard of its own beside its trajectory's.

Everything but :meth:`LateRows.fill` needs ``Contents.lock``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import ColumnSpec, Schema
from trajstore._core.reading.address_table import AddressTable
from trajstore._core.reading.late import COLUMNS, late_columns
from trajstore._core.reading.plan import Late, RowPlan, put_rows
from trajstore._core.store.facts import NOTE_ROWS, NOTE_START
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import SchemaMismatchError


def split_late(index: TrajectoryIndex, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into per-trajectory and per-row values, all prefixed with ``notes.``."""
    rows = {COLUMNS + name for name in index.row_notes}
    return [name for name in names if name not in rows], [name for name in names if name in rows]


def row_locations(index: TrajectoryIndex, positions: IntArray, name: str) -> tuple[IntArray, IntArray]:
    """Return slot (-1 for none) and first row of each trajectory's values of this name, each ``[n]``."""
    own = name.removeprefix(COLUMNS)
    slots, starts = (index.at(kind + own, positions).astype(np.int64) for kind in (NOTE_ROWS, NOTE_START))
    return slots, starts


@dataclass(frozen=True, slots=True)
class LateColumn:
    """A column of per-row values of the trajectories at some positions.

    Attributes:
        name: prefixed with ``notes.``.
        column: its spec in the shards.
        slots: resident slot of each trajectory's values; -1 for none.
        starts: first row of each trajectory in its slot.
    """

    name: str
    column: ColumnSpec
    slots: IntArray
    starts: IntArray


def late_rows_of(
    table: AddressTable, index: TrajectoryIndex, positions: IntArray, names: Sequence[str], beside: IntArray
) -> list[LateColumn]:
    """Make per-row values readable in place and return them.

    Args:
        table: address table of the slots.
        index: index of the trajectories.
        positions: positions of the trajectories, ``[n]``.
        names: prefixed with ``notes.``; the index has all of them.
        beside: resident slots that must stay resident.

    Raises:
        SchemaMismatchError: a trajectory lacks values and the dtype has no NaN, or stores differ in a column.
        CorruptStoreError: a file is missing or damaged.
    """
    if not names:
        return []
    locations = [row_locations(index, positions, name) for name in names]
    needed = np.concatenate([*(slots[slots >= 0] for slots, _ in locations), beside])
    table.ensure_decoded(needed)
    columns = []
    for name, (slots, starts) in zip(names, locations, strict=True):
        with_values = slots[slots >= 0]
        if not len(with_values):  # none: take the spec from another trajectory
            others = index[NOTE_ROWS + name.removeprefix(COLUMNS)]
            with_values = others[others >= 0][:1].astype(np.int64)
            table.ensure_decoded(np.concatenate([with_values, needed]))
        column = _column_in(table, name, with_values)
        lacking = positions[slots < 0]
        if len(lacking) and not (column.torch_dtype.is_floating_point or column.torch_dtype.is_complex):
            number = int(index.at("trajectory_id", lacking[0]))
            raise SchemaMismatchError(
                f"column {name}: trajectory {shown_id(number)} has no rows, and {column.dtype} has no NaN for "
                "missing ones; annotate all, or draw only those that have rows"
            )
        columns.append(LateColumn(name, column, slots, starts))
    return columns


def _column_in(table: AddressTable, name: str, slots: IntArray) -> ColumnSpec:
    """Return the common spec of per-row values in some slots.

    Raises:
        SchemaMismatchError: specs differ, as between stores, or no slot is left.
    """
    specs = {column_named(table.schema(slot), name.removeprefix(COLUMNS)) for slot in np.unique(slots).tolist()}
    if len(specs) > 1:
        variants = " and ".join(sorted(f"{column.dtype} {list(column.row_shape)}" for column in specs))
        raise SchemaMismatchError(f"column {name}: its rows are {variants} in different stores; use the same in all")
    if not specs:
        raise SchemaMismatchError(f"column {name}: no trajectory here has such rows")
    return specs.pop()


def column_named(schema: Schema, name: str) -> ColumnSpec:
    """Return the column with this name, which the schema must have."""
    return next(column for column in schema.columns if column.name == name)


@dataclass(frozen=True, slots=True)
class LateRows:
    """A batch column of late per-row values; NaN where none were given.

    Attributes:
        spec: spec of the column.
        given: mask of the rows that have values, ``[n]``.
        plan: plan for these rows; None if there are none.
    """

    spec: ColumnSpec
    given: npt.NDArray[np.bool_]
    plan: RowPlan | None

    def fill(self, target: torch.Tensor) -> None:
        """Write the rows into a tensor ``[n, *row_shape]``; without ``Contents.lock``.

        Raises:
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        whole = bool(self.given.all())
        if not whole:
            target.fill_(float("nan"))
        if self.plan is not None:
            stored = self.spec.name.removeprefix(COLUMNS)
            (rows,) = self.plan.read({stored: target} if whole else None).values()
            if not whole:
                put_rows(target, np.flatnonzero(self.given), rows)


def late_of_batch(
    table: AddressTable,
    index: TrajectoryIndex,
    positions: IntArray,
    rows: IntArray,
    slots: IntArray,
    names: Sequence[str],
) -> list[Late]:
    """Return late columns for rows whose slots are resident, and stay resident.

    Args:
        table: address table of the slots.
        index: index of the trajectories.
        positions: position of each row's trajectory, ``[n]``.
        rows: row within its trajectory, ``[n]``.
        slots: slot of each row's trajectory, ``[n]``.
        names: prefixed with ``notes.``.

    Raises:
        SchemaMismatchError: a trajectory lacks values and the dtype has no NaN, stores differ in a column, or no values
            exist.
        CorruptStoreError: a file is missing or damaged.
    """
    of_each, by_row = split_late(index, names)
    given = late_rows_of(table, index, positions, by_row, slots)
    columns: list[Late] = [
        *late_columns(index, positions, of_each),
        *(_late_rows(table, column_rows, rows) for column_rows in given),
    ]
    by_name = {column.spec.name: column for column in columns}
    return [by_name[name] for name in names]


def _late_rows(table: AddressTable, given: LateColumn, rows: IntArray) -> LateRows:
    column, given_mask = given.column, given.slots >= 0
    plan = None
    if given_mask.any():
        slots = given.slots[given_mask]
        places = np.zeros((3, len(slots)), np.int64)
        places[Axis.SAMPLES] = (given.starts + rows)[given_mask]
        number = table.number_of(int(slots[0]), column)
        plan = RowPlan(table, slots, places, table.columns.set_of([number]))
    return LateRows(ColumnSpec(given.name, column.dtype, column.row_shape), given_mask, plan)
