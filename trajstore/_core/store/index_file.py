"""The JSON form of an index, as stored in a directory. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.store.entry_checks import Columns, EntryGate, FaultsIn, range_faults
from trajstore._core.store.facts import MOST_SCORES, fact_dtype, is_fact
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.json_arrays import (
    UNPACKING_ERRORS,
    StringTable,
    array_from_json,
    array_to_json,
    blocks_from_json,
    declared_rows,
    packed_length,
    rows_of,
)
from trajstore._core.store.sealed import FROM_A_COPY, OR_WHAT_IS_WHOLE
from trajstore._core.store.waiting import LazyColumn
from trajstore.errors import CorruptStoreError


def index_to_json(index: TrajectoryIndex, shard: npt.NDArray[Any] | None = None) -> dict[str, Any]:
    """Return all kept entries as JSON values.

    Args:
        index: has them.
        shard: shard rows to write instead of those in the index.
    """
    columns = {name: index[name] for name in COLUMNS} | ({} if shard is None else {"shard": shard})
    return {
        "columns": {name: array_to_json(column) for name, column in columns.items()},
        "facts": {name: array_to_json(index[name]) for name in index.facts},
        "weights": index.texts.to_json(),
    }


def index_from_json(
    value: Any,
    shards: int,
    checks: Sequence[FaultsIn] = (),
    gate: EntryGate | None = None,
    *,
    rows: tuple[int, int] | None = None,
    later: str | None = None,
) -> TrajectoryIndex:
    """Return the index described by :func:`index_to_json`, or some of its entries; others are not unpacked.

    Args:
        value: the JSON values.
        shards: number of shards in the table that the entries refer to.
        checks: of entries whose numbers are in range; each applies to entries that the one before admits.
        gate: omits or refuses invalid entries; None refuses them.
        rows: first of the entries, and their end; None: all.
        later: name of the file, to unpack and check some columns lazily; the gate must then refuse.

    Raises:
        CorruptStoreError: it does not describe an index, or columns disagree.
    """
    index, gate = TrajectoryIndex(), gate or EntryGate()
    try:
        packed, dtypes = _packed_columns(value)
        index.texts = StringTable.from_json(value["weights"])
        first, end = rows or (0, declared_rows(packed["trajectory_id"]))
        lazy = [name for name in dtypes if later is not None and (name in _LAZY or is_fact(name))]
        eager = {name: dtype for name, dtype in dtypes.items() if name not in lazy}
        capacity = (end - first) * (1 if lazy else 2)  # so that a writer's first commit does not copy it
        columns, kept = {name: np.zeros(capacity, dtype) for name, dtype in eager.items()}, 0
        checks = (lambda block: range_faults(block, shards, len(index.texts)), *checks)
        for block in blocks_from_json(packed, eager, first, end):
            admitted = _admitted(block, checks, gate)
            count = len(admitted["trajectory_id"])
            for name, column in columns.items():
                column[kept : kept + count] = admitted[name]
            kept += count
        index.adopt(columns, kept)
        index.wait_for(
            {name: _lazy_column(name, packed, dtypes, (first, end), index, shards, f"{later}") for name in lazy}
        )
    except (*UNPACKING_ERRORS, IndexError, AttributeError) as error:
        raise CorruptStoreError(f"not an index: {error}") from error
    return index


def _admitted(block: Columns, checks: Sequence[FaultsIn], gate: EntryGate) -> Columns:
    """Return the valid entries of some; raises as :meth:`EntryGate.admit`."""
    # Equal rows are checked as one.
    checked = {name: rows if rows.strides[0] else rows[:1] for name, rows in block.items()}
    if all(next(faults(checked), None) is None for faults in checks):
        return block
    for faults in checks:
        block = gate.admit(block, faults(block))
    return block


_VERSIONS = ("version_low", "version_high")

_LAZY = frozenset({"uuid", "nbytes", "max_episode_length", *_VERSIONS, "committed", "weights"})
"""Columns that are not needed to show and draw trajectories; facts are others."""


def _lazy_column(
    name: str,
    packed: Mapping[str, Any],
    dtypes: Mapping[str, npt.DTypeLike],
    rows: tuple[int, int],
    index: TrajectoryIndex,
    shards: int,
    source: str,
) -> LazyColumn:
    """Return a column that is unpacked and checked on first use.

    Args:
        name: of the column.
        packed: the JSON form of all columns.
        dtypes: of the columns.
        rows: first and end of the entries.
        index: of these entries.
        shards: number of shards in their table.
        source: name of the file.
    """
    names = _VERSIONS if name in _VERSIONS else (name,)
    parts = {part: rows_of(packed[part], *rows) for part in names}
    ids, texts = index["trajectory_id"], len(index.texts)

    def unpack() -> npt.NDArray[Any]:
        """Raises CorruptStoreError: the column is no packed array, or has invalid values; names the file."""
        columns = {"trajectory_id": ids}
        try:
            for part, (array, first) in parts.items():
                columns[part] = array_from_json(array, dtypes[part])[rows[0] - first : rows[1] - first]
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{source}: index column {name}: {error}{FROM_A_COPY}{OR_WHAT_IS_WHOLE}") from error
        faults = range_faults(columns, shards, texts)
        EntryGate().admit(columns, ((f"{source}: {fault}", wrong) for fault, wrong in faults))
        return columns[name]

    return LazyColumn(unpack, len(ids))


_LEAST_NBYTES = 2  # of an entry in a file: its UUID; many UUIDs may have equal beginnings

_MOST_FACTS = MOST_SCORES + 16


def _packed_columns(value: Any) -> tuple[Mapping[str, Any], dict[str, npt.DTypeLike]]:
    """Return the packed columns of an index, facts included, and the dtype of each.

    Raises:
        CorruptStoreError: they claim more entries than they can hold.
        KeyError, TypeError, ValueError, AttributeError: they are not packed arrays.
    """
    facts = {name: column for name, column in value["facts"].items() if is_fact(name)}
    _check_declared(value["columns"], facts)
    return {**value["columns"], **facts}, {**COLUMNS, **{name: fact_dtype(name) for name in facts}}


def _check_declared(packed: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse columns that claim more entries than their bytes can hold, before allocating memory.

    Raises:
        CorruptStoreError: they do.
        KeyError, TypeError, ValueError: they are not packed arrays.
    """
    count = declared_rows(packed["trajectory_id"])
    if len(facts) > _MOST_FACTS:
        raise CorruptStoreError(
            f"the index has {len(facts)} facts of each rollout, the most that can be is {_MOST_FACTS}"
        )
    for name, column in (*((name, packed[name]) for name in COLUMNS), *facts.items()):
        if declared_rows(column) != count:
            raise CorruptStoreError(f"index column {name} has {declared_rows(column)} entries, not {count}")
    if count * _LEAST_NBYTES > packed_length(packed["uuid"]) + 1024:
        raise CorruptStoreError(f"the index claims {count} entries, more than its bytes can hold")
