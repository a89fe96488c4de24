"""Values by row that came late, where they are read: each lies in a shard of its own beside its trajectory's.

With ``Contents.lock`` held, but for :meth:`LateRows.fill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.columns.fields import Axis
from trajstore.core.columns.schema import ColumnSpec, Schema
from trajstore.core.reading.address_table import AddressTable
from trajstore.core.reading.late import COLUMNS, late_columns
from trajstore.core.reading.plan import Late, RowPlan
from trajstore.core.store.facts import NOTE_ROWS, NOTE_START
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import SchemaMismatchError

IntArray = npt.NDArray[np.int64]


def split_late(index: TrajectoryIndex, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of values of trajectories, and those of values by row; each with ``notes.`` before it."""
    rows = {COLUMNS + name for name in index.row_notes}
    return [name for name in names if name not in rows], [name for name in names if name in rows]


def row_locations(index: TrajectoryIndex, positions: IntArray, name: str) -> tuple[IntArray, IntArray]:
    """Return slot (-1 for none) and first row of the values of this name that trajectories have, each ``[n]``."""
    own = name.removeprefix(COLUMNS)
    slots, starts = (index.at(kind + own, positions).astype(np.int64) for kind in (NOTE_ROWS, NOTE_START))
    return slots, starts


@dataclass(frozen=True, slots=True)
class GivenRows:
    """A column of values by row, of the trajectories at some positions.

    Attributes:
        name: with ``notes.`` before it.
        column: as its shards have it.
        slots: of each trajectory's values, resident; -1 for none.
        starts: first row of each in its slot.
    """

    name: str
    column: ColumnSpec
    slots: IntArray
    starts: IntArray


def given_rows(
    table: AddressTable,
    index: TrajectoryIndex,
    positions: IntArray,
    names: Sequence[str],
    beside: IntArray,
) -> list[GivenRows]:
    """Return values by row, made readable in place.

    Args:
        table: of the slots.
        index: of the trajectories.
        positions: of those wanted, ``[n]``.
        names: with ``notes.`` before each; the index has rows of all.
        beside: slots that are resident, and stay so.

    Raises:
        SchemaMismatchError: a trajectory lacks values that have no NaN, or stores differ in a column.
        CorruptStoreError: a file is missing or damaged.
    """
    if not names:
        return []
    locations = [row_locations(index, positions, name) for name in names]
    needed = np.concatenate([*(slots[slots >= 0] for slots, _ in locations), beside])
    table.ensure_decoded(needed)
    found = []
    for name, (slots, starts) in zip(names, locations, strict=True):
        telling = slots[slots >= 0]
        if not len(telling):  # none at all: those of another trajectory tell what they are
            others = index[NOTE_ROWS + name.removeprefix(COLUMNS)]
            telling = others[others >= 0][:1].astype(np.int64)
            table.ensure_decoded(np.concatenate([telling, needed]))
        column = _column_in(table, name, telling)
        lacking = positions[slots < 0]
        if len(lacking) and not (column.torch_dtype.is_floating_point or column.torch_dtype.is_complex):
            number = int(index.at("trajectory_id", lacking[0]))
            raise SchemaMismatchError(
                f"column {name}: trajectory {shown_id(number)} was given no rows, and {column.dtype} has no NaN to say "
                "so; give rows to all, or draw only those that have them"
            )
        found.append(GivenRows(name, column, slots, starts))
    return found


def _column_in(table: AddressTable, name: str, slots: IntArray) -> ColumnSpec:
    """Return the column that values by row have in some slots.

    Raises:
        SchemaMismatchError: they differ, as those of several stores may; or there are none any more.
    """
    found = {column_named(table.schema(slot), name.removeprefix(COLUMNS)) for slot in np.unique(slots).tolist()}
    if len(found) > 1:
        told = " and ".join(sorted(f"{column.dtype} {list(column.row_shape)}" for column in found))
        raise SchemaMismatchError(f"column {name}: its rows are {told} in different stores; give them alike")
    if not found:
        raise SchemaMismatchError(f"column {name}: no trajectory that is here has such rows")
    return found.pop()


def column_named(schema: Schema, name: str) -> ColumnSpec:
    """Return the column of values by row of a schema that has it."""
    return next(column for column in schema.columns if column.name == name)


@dataclass(frozen=True, slots=True)
class LateRows:
    """A column of a batch whose rows were given late; NaN where none were.

    Attributes:
        spec: of the column.
        given: which rows of the batch have values, ``[n]``.
        plan: of these rows; None for none.
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
                target[torch.from_numpy(self.given)] = rows


def late_of_batch(
    table: AddressTable,
    index: TrajectoryIndex,
    positions: IntArray,
    rows: IntArray,
    slots: IntArray,
    names: Sequence[str],
) -> list[Late]:
    """Return columns of values that came late, of rows whose slots are resident, and stay so.

    Args:
        table: of the slots.
        index: of the trajectories.
        positions: of the rows' trajectories, ``[n]``.
        rows: within their trajectories, ``[n]``.
        slots: of the trajectories, ``[n]``.
        names: with ``notes.`` before each.

    Raises:
        SchemaMismatchError: a trajectory lacks values that have no NaN, stores differ in a column, or there is none.
        CorruptStoreError: a file is missing or damaged.
    """
    of_each, by_row = split_late(index, names)
    given = given_rows(table, index, positions, by_row, slots)
    columns: list[Late] = [*late_columns(index, positions, of_each), *(_late_rows(table, one, rows) for one in given)]
    by_name = {column.spec.name: column for column in columns}
    return [by_name[name] for name in names]


def _late_rows(table: AddressTable, given: GivenRows, rows: IntArray) -> LateRows:
    column, there = given.column, given.slots >= 0
    plan = None
    if there.any():
        slots = given.slots[there]
        places = np.zeros((3, len(slots)), np.int64)
        places[Axis.SAMPLES] = (given.starts + rows)[there]
        number = table.number_of(int(slots[0]), column)
        plan = RowPlan(table, slots, places, table.columns.set_of([number]))
    return LateRows(ColumnSpec(given.name, column.dtype, column.row_shape), there, plan)
