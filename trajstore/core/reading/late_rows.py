"""Values by row that came late, where they are read: each lies in a shard of its own beside its trajectory's.

With ``Contents.lock`` held, but for :meth:`LateColumn.fill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.columns.fields import Axis
from trajstore.core.columns.schema import ColumnSpec, Schema
from trajstore.core.reading.address_table import AddressTable, HeldRows, MappedShard
from trajstore.core.reading.batch import RowPlan
from trajstore.core.reading.gather import Located
from trajstore.core.reading.late import COLUMNS
from trajstore.core.reading.sources import Source
from trajstore.core.store.facts import NOTE_ROWS, NOTE_START
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import SchemaMismatchError

IntArray = npt.NDArray[np.int64]


def split_late(index: TrajectoryIndex, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of values of trajectories, and those of values by row; each with ``notes.`` before it."""
    rows = {COLUMNS + name for name in index.row_notes}
    return [name for name in names if name not in rows], [name for name in names if name in rows]


def make_resident(addresses: AddressTable, sources: Sequence[Source], slots: IntArray) -> None:
    """Let values by row be read in place, and what is resident already in others of these slots still.

    Raises:
        CorruptStoreError: a file is missing or damaged.
    """
    for slot in addresses.ensure(slots, lambda *_: None):
        source, row = addresses.shard_of(slot)
        manifest, reader = sources[source].manifest(row), sources[source].reader(row)
        tensors = [reader.rows(number, 0, rows) for number, rows in enumerate(manifest.rows)]
        addresses.keep(slot, MappedShard(manifest.schema, [tensor.data_ptr() for tensor in tensors], tensors))


def homes_of(index: TrajectoryIndex, positions: IntArray, name: str) -> tuple[IntArray, IntArray]:
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
    addresses: AddressTable,
    sources: Sequence[Source],
    index: TrajectoryIndex,
    positions: IntArray,
    names: Sequence[str],
    beside: IntArray,
) -> tuple[list[GivenRows], IntArray]:
    """Find values by row, which can be read in place then; return them, and all slots that they and the caller need.

    Args:
        addresses: of the slots.
        sources: of the shards.
        index: of the trajectories.
        positions: of those wanted, ``[n]``.
        names: with ``notes.`` before each; the index has rows of all.
        beside: slots that are resident, and stay so.

    Raises:
        SchemaMismatchError: a trajectory lacks values that have no NaN, or stores differ in a column.
        CorruptStoreError: a file is missing or damaged.
    """
    if not names:
        return [], beside
    homes = [homes_of(index, positions, name) for name in names]
    needed = np.concatenate([*(slots[slots >= 0] for slots, _ in homes), beside])
    make_resident(addresses, sources, needed)
    found = []
    for name, (slots, starts) in zip(names, homes, strict=True):
        telling = slots[slots >= 0]
        if not len(telling):  # none at all: those of another trajectory tell what they are
            others = index[NOTE_ROWS + name.removeprefix(COLUMNS)]
            telling = others[others >= 0][:1].astype(np.int64)
            make_resident(addresses, sources, np.concatenate([telling, needed]))
        column = _column_in(addresses, name, telling)
        lacking = positions[slots < 0]
        if len(lacking) and not (column.torch_dtype.is_floating_point or column.torch_dtype.is_complex):
            number = int(index.at("trajectory_id", lacking[0]))
            raise SchemaMismatchError(
                f"column {name}: trajectory {shown_id(number)} was given no rows, and {column.dtype} has no NaN to say "
                "so; give rows to all, or draw only those that have them"
            )
        found.append(GivenRows(name, column, slots, starts))
    return found, needed


def _column_in(addresses: AddressTable, name: str, slots: IntArray) -> ColumnSpec:
    """Return the column that values by row have in some slots.

    Raises:
        SchemaMismatchError: they differ, as those of several stores may; or there are none any more.
    """
    found = {column_named(addresses.schema(slot), name.removeprefix(COLUMNS)) for slot in np.unique(slots).tolist()}
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
        prepared: these rows; None for none.
    """

    spec: ColumnSpec
    given: npt.NDArray[np.bool_]
    prepared: RowPlan | None

    def fill(self, target: torch.Tensor) -> None:
        """Write the rows into a tensor ``[n, *row_shape]``; without ``Contents.lock``.

        Raises:
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        whole = bool(self.given.all())
        if not whole:
            target.fill_(float("nan"))
        if self.prepared is not None:
            (rows,) = self.prepared.read({self.prepared.specs[0].name: target} if whole else None).values()
            if not whole:
                target[torch.from_numpy(self.given)] = rows


def late_rows(
    addresses: AddressTable, sources: Sequence[Source], index: TrajectoryIndex, located: Located, names: Sequence[str]
) -> list[LateRows]:
    """Return columns of values by row of samples whose slots are resident, and stay so.

    Args:
        addresses: of the slots.
        sources: of the shards.
        index: of the trajectories.
        located: the samples.
        names: with ``notes.`` before each; the index has rows of all.

    Raises:
        SchemaMismatchError: a trajectory lacks values that have no NaN, or stores differ in a column.
        CorruptStoreError: a file is missing or damaged.
    """
    found, _ = given_rows(addresses, sources, index, located.position, names, located.slot)
    places = located.rows[0] - index.at("start_samples", located.position)
    return [
        LateRows(
            ColumnSpec(one.name, one.column.dtype, one.column.row_shape),
            one.slots >= 0,
            _prepared(addresses, one, located, places),
        )
        for one in found
    ]


def _prepared(addresses: AddressTable, found: GivenRows, located: Located, places: IntArray) -> RowPlan | None:
    given = found.slots >= 0
    if not given.any():
        return None
    slots, column = found.slots[given], found.column
    schema = addresses.schema(int(slots[0]))
    at = schema.columns.index(column)
    on_axes = np.zeros((3, len(slots)), np.int64)
    on_axes[Axis.SAMPLES] = (found.starts + places)[given]
    inside = Located(located.position[given], slots, on_axes)
    plain = ColumnSpec(column.name, column.dtype, column.row_shape)
    return RowPlan(inside, addresses.columns.of(schema)[0][at : at + 1], [plain], HeldRows(addresses, slots), [], [])
