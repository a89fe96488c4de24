"""The JSON form of an index, as stored in a directory. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.store.entry_checks import (
    EntryGate,
    FaultsIn,
    check_lengths,
    fact_ranges,
    out_of_range,
    range_faults,
)
from trajstore._core.store.facts import MOST_SCORES, fact_dtype, is_fact
from trajstore._core.store.index import COLUMNS, SAMPLES, TrajectoryIndex
from trajstore._core.store.json_arrays import (
    UNPACKING_ERRORS,
    StringTable,
    array_from_json,
    array_to_json,
    blocks_from_json,
    declared_rows,
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
    value: Any, shards: int, gate: EntryGate | None = None, later: str | None = None
) -> TrajectoryIndex:
    """Return the index described by :func:`index_to_json`.

    Args:
        value: the JSON values.
        shards: number of shards in the table that the entries refer to.
        gate: omits or refuses invalid entries; None refuses them.
        later: name of the file, to unpack and check UUIDs and facts lazily; the gate must then refuse.

    Raises:
        CorruptStoreError: it does not describe an index, or columns disagree.
    """
    index = TrajectoryIndex()
    try:
        packed, dtypes = _packed_columns(value)
        lazy = [name for name in dtypes if name == "uuid" or is_fact(name)] if later is not None else []
        waiting = {name: dtypes.pop(name) for name in lazy}
        columns = _unpacked(packed, dtypes)
        index.texts = StringTable.from_json(value["weights"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptStoreError(f"not an index: {error}") from error
    check_lengths(columns)
    index.adopt((gate or EntryGate()).admit(columns, range_faults(columns, shards, len(index.texts))))
    ids, texts = columns["trajectory_id"], len(index.texts)
    index.wait_for(
        {
            name: LazyColumn(partial(_unpacked_later, name, _own(packed[name]), dtype, ids, texts, f"{later}"))
            for name, dtype in waiting.items()
        }
    )
    return index


def _own(packed: Any) -> Any:
    """Return a packed array whose data is no view of the whole file, which would stay in memory with it."""
    is_view = isinstance(packed, dict) and isinstance(packed.get("data"), memoryview)
    return {**packed, "data": bytes(packed["data"])} if is_view else packed


def part_from_json(value: Any, shards: int, first: int, end: int, checks: Sequence[FaultsIn]) -> TrajectoryIndex | None:
    """Return the entries ``first <= i < end`` of those described by :func:`index_to_json`.

    All entries are unpacked and checked, a block at a time, so that only those returned take memory. UUIDs, all of
    which are valid, are unpacked up to the last one returned.

    Args:
        value: the JSON values.
        shards: number of shards in the table that the entries refer to.
        first: of the entries.
        end: of the entries.
        checks: of entries whose numbers are in range; each applies to entries that the one before admits.

    Returns:
        None if an entry is invalid: :func:`index_from_json` then describes the damage.
    """
    index, begin, samples = TrajectoryIndex(), 0, 0.0
    try:
        packed, dtypes = _packed_columns(value)
        index.texts = StringTable.from_json(value["weights"])
        checks = (lambda block: range_faults(block, shards, len(index.texts)), *checks)
        columns = {name: np.empty(end - first, dtype) for name, dtype in dtypes.items()}
        for block in blocks_from_json(packed, {name: dtypes[name] for name in dtypes if name != "uuid"}):
            for name, rows in block.items():
                _put(columns[name], rows, begin - first)
            begin += len(block[SAMPLES])
            samples += float(block[SAMPLES].sum(dtype=np.float64))
            # Equal rows are checked as one.
            checked = {name: rows if rows.strides[0] else rows[:1] for name, rows in block.items()}
            if any(next(faults(checked), None) is not None for faults in checks):
                return None
        begin = 0
        for block in blocks_from_json(packed, {"uuid": dtypes["uuid"]}):
            _put(columns["uuid"], block["uuid"], begin - first)
            begin += len(block["uuid"])
            if begin >= end:
                break
    except (*UNPACKING_ERRORS, IndexError, AttributeError, CorruptStoreError):
        return None
    if samples > _MANY_SAMPLES:
        return None
    index.adopt(columns)
    return index


def _put(column: npt.NDArray[Any], rows: npt.NDArray[Any], place: int) -> None:
    """Copy the rows that fall into a column if the first of them has this place in it, which may be negative."""
    target = column[max(place, 0) : max(place + len(rows), 0)]
    target[:] = rows[max(-place, 0) :][: len(target)]


_MANY_SAMPLES = float(1 << 61)
"""Half of the samples that an index may have."""


def _unpacked_later(
    name: str, packed: Any, dtype: npt.DTypeLike, ids: npt.NDArray[Any], texts: int, source: str
) -> npt.NDArray[Any]:
    """Unpack and check a lazy column.

    Args:
        name: of the column.
        packed: its JSON form.
        dtype: of the column.
        ids: of its entries.
        texts: number of texts in the string table.
        source: name of the file.

    Raises:
        CorruptStoreError: it is not a packed array, or has invalid values; names the file.
    """
    try:
        column = array_from_json(packed, dtype)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{source}: index column {name}: {error}{FROM_A_COPY}{OR_WHAT_IS_WHOLE}") from error
    faults = out_of_range({name: column}, fact_ranges(texts))
    EntryGate().admit({"trajectory_id": ids}, ((f"{source}: {fault}", wrong) for fault, wrong in faults))
    return column


def _unpacked(packed: Mapping[str, Any], dtypes: Mapping[str, npt.DTypeLike]) -> dict[str, npt.NDArray[Any]]:
    """Unpack columns to given dtypes, using two threads for a long index.

    Raises:
        CorruptStoreError: one is not a packed array.
    """

    def unpacked(name: str) -> npt.NDArray[Any]:
        return array_from_json(packed[name], dtypes[name])

    if declared_rows(packed["trajectory_id"]) < _LONG:
        return {name: unpacked(name) for name in dtypes}
    with ThreadPoolExecutor(2, thread_name_prefix="trajstore-unpack") as threads:
        return dict(zip(dtypes, threads.map(unpacked, dtypes), strict=True))


_LONG = 1 << 18
"""Minimum number of entries for which a second thread is faster."""

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
    if count * _LEAST_NBYTES > len(packed["uuid"]["data"]) + 1024:
        raise CorruptStoreError(f"the index claims {count} entries, more than its bytes can hold")
