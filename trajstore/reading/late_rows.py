"""Values by row that came late, where they are read: each lies in a shard of its own beside its trajectory's.

With ``Contents.lock`` held, but for :meth:`LateColumn.fill`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajstore.columns.fields import Axis
from trajstore.columns.schema import ColumnSpec, Schema
from trajstore.errors import SchemaMismatchError
from trajstore.files.partial import fetched
from trajstore.reading.batch import Prepared
from trajstore.reading.gather import Located
from trajstore.reading.late import COLUMNS
from trajstore.reading.residency import HeldRows, MappedShard, Residency
from trajstore.reading.sources import Source
from trajstore.store.facts import NOTE_ROWS, NOTE_START
from trajstore.store.index import TrajectoryIndex
from trajstore.store.run_ids import shown_id

IntArray = npt.NDArray[np.int64]


def split_late(index: TrajectoryIndex, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of values of trajectories, and those of values by row; each with ``notes.`` before it."""
    rows = {COLUMNS + name for name in index.row_notes}
    return [name for name in names if name not in rows], [name for name in names if name in rows]


def make_resident(residency: Residency, sources: Sequence[Source], slots: IntArray, beside: IntArray) -> None:
    """Let values by row be read in place, and what is in the slots ``beside`` still.

    Args:
        residency: of the slots.
        sources: of the shards.
        slots: of the values, repeated or not.
        beside: slots that are resident.

    Raises:
        CorruptStoreError: a file is missing or damaged.
    """
    for slot in residency.ensure(np.concatenate([slots, beside]), lambda *_: None):
        source, row = residency.shard_of(slot)
        manifest, reader = sources[source].manifest(row), sources[source].reader(row)
        tensors = [reader.rows(number, 0, rows) for number, rows in enumerate(manifest.rows)]
        residency.keep(slot, MappedShard(manifest.schema, [tensor.data_ptr() for tensor in tensors], tensors))


def homes_of(index: TrajectoryIndex, positions: IntArray, names: Sequence[str]) -> dict[str, tuple[IntArray, IntArray]]:
    """Return, by name, slot (-1 for none) and first row of the values of the trajectories at some positions."""
    return {
        name: (
            index.at(NOTE_ROWS + name.removeprefix(COLUMNS), positions).astype(np.int64),
            index.at(NOTE_START + name.removeprefix(COLUMNS), positions).astype(np.int64),
        )
        for name in names
    }


def column_of(
    residency: Residency,
    sources: Sequence[Source],
    index: TrajectoryIndex,
    name: str,
    slots: IntArray,
    beside: IntArray,
) -> ColumnSpec:
    """Return the column of values by row.

    Args:
        residency: of the slots.
        sources: of the shards.
        index: has rows of this name.
        name: with ``notes.`` before it.
        slots: of the values, resident; -1 for none. Where there are none at all, those of another trajectory tell.
        beside: slots that are resident, and stay so.

    Raises:
        SchemaMismatchError: they differ, as those of several stores may; or there are none any more.
    """
    own = name.removeprefix(COLUMNS)
    if not (slots >= 0).any():
        others = index[NOTE_ROWS + own]
        slots = others[others >= 0][:1].astype(np.int64)
        make_resident(residency, sources, slots, beside)
    found = {column_named(residency.schema(slot), own) for slot in np.unique(slots[slots >= 0]).tolist()}
    if len(found) > 1:
        told = " and ".join(sorted(f"{column.dtype} {list(column.row_shape)}" for column in found))
        raise SchemaMismatchError(f"column {name}: its rows are {told} in different stores; give them alike")
    if not found:
        raise SchemaMismatchError(f"column {name}: no trajectory that is here has such rows")
    return found.pop()


def column_named(schema: Schema, name: str) -> ColumnSpec:
    """Return the column of values by row of a schema that has it."""
    return _column(schema, name)[1]


def _column(schema: Schema, name: str) -> tuple[int, ColumnSpec]:
    return next((at, column) for at, column in enumerate(schema.columns) if column.name == name)


def check_given(name: str, column: ColumnSpec, index: TrajectoryIndex, lacking: IntArray) -> None:
    """Refuse trajectories without values where NaN cannot stand for them; ``lacking`` has their positions.

    Raises:
        SchemaMismatchError: names one.
    """
    if len(lacking) and not (column.torch_dtype.is_floating_point or column.torch_dtype.is_complex):
        number = int(index.at("trajectory_id", lacking[0]))
        raise SchemaMismatchError(
            f"column {name}: trajectory {shown_id(number)} was given no rows, and {column.dtype} has no NaN to say so; "
            "give rows to all, or draw only those that have them"
        )


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
    prepared: Prepared | None

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
    residency: Residency, sources: Sequence[Source], index: TrajectoryIndex, located: Located, names: Sequence[str]
) -> list[LateRows]:
    """Return columns of values by row of samples whose slots are resident, and stay so.

    Args:
        residency: of the slots.
        sources: of the shards.
        index: of the trajectories.
        located: the samples.
        names: with ``notes.`` before each; the index has rows of all.

    Raises:
        SchemaMismatchError: a trajectory lacks values that have no NaN, or stores differ in a column.
        CorruptStoreError: a file is missing or damaged.
    """
    homes = homes_of(index, located.position, names)
    every = [slots[slots >= 0] for slots, _ in homes.values()]
    needed = np.concatenate([*every, located.slot])
    make_resident(residency, sources, needed, located.slot)
    places = located.rows[0] - index.at("start_samples", located.position)
    columns = []
    for name, (slots, starts) in homes.items():
        given = slots >= 0
        column = column_of(residency, sources, index, name, slots, needed)
        check_given(name, column, index, located.position[~given])
        spec = ColumnSpec(name, column.dtype, column.row_shape)
        columns.append(LateRows(spec, given, _prepared(residency, column, located, given, slots, starts + places)))
    return columns


def _prepared(
    residency: Residency,
    column: ColumnSpec,
    located: Located,
    given: npt.NDArray[np.bool_],
    slots: IntArray,
    rows: IntArray,
) -> Prepared | None:
    if not given.any():
        return None
    slots = slots[given]
    schema = residency.schema(int(slots[0]))
    at, _ = _column(schema, column.name)
    number = residency.columns.of(schema)[0][at : at + 1]
    on_axes = np.zeros((3, len(slots)), np.int64)
    on_axes[Axis.SAMPLES] = rows[given]
    inside = Located(located.position[given], slots, on_axes)
    plain = ColumnSpec(column.name, column.dtype, column.row_shape)
    return Prepared(inside, number, [plain], HeldRows(residency, slots), [], [])


def whole_rows(
    residency: Residency, sources: Sequence[Source], index: TrajectoryIndex, position: int
) -> dict[str, torch.Tensor]:
    """Return all values by row of the trajectory at a position, by name: ``[T, B, ...]`` or ``[L]`` or ``[R]``.

    Raises:
        CorruptStoreError: a file is missing or damaged.
    """
    found = {}
    one = np.array([position], np.int64)
    extent = index.entry(position).extent
    for name, (slots, starts) in homes_of(index, one, index.row_notes).items():
        slot = int(slots[0])
        if slot < 0:
            continue
        make_resident(residency, sources, slots, np.zeros(0, np.int64))
        schema = residency.schema(slot)
        at, column = _column(schema, name)
        rows = extent.rows(column.axis)
        tensor = torch.empty((rows, *column.row_shape), dtype=column.torch_dtype)
        held = HeldRows(residency, slots)
        address = held.addresses_of(slot)[at] + int(starts[0]) * column.row_nbytes
        pieces = (np.array([address], np.int64), np.array([tensor.nbytes], np.int64))
        with fetched(held.partial, lambda pieces=pieces: pieces):  # type: ignore[misc]
            if tensor.nbytes:
                ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
        held.let_go()
        steps = (extent.steps, extent.batch) if schema.kind == "step" else (rows,)
        found[name] = tensor.reshape(*steps, *column.row_shape)
    return found
