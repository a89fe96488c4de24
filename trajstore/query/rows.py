"""Tokens of rollouts and steps of blocks as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import VALID
from trajstore._core.reading.address_table import UNAVAILABLE
from trajstore._core.reading.contents import Contents
from trajstore._core.reading.late import COLUMNS, without_notes
from trajstore._core.reading.late_rows import column_named
from trajstore._core.reading.plan import RowPlan
from trajstore._core.reading.tokens import token_rows
from trajstore._core.store.facts import NOTE_ROWS
from trajstore.query.engine import pl
from trajstore.query.readable import Locked, positions_of

TOKENS: Mapping[str, tuple[str, str]] = {
    "position": ("Int64", "its number in the rollout, from 0 on"),
    "input_ids": ("Int64", "id of the token"),
    "attention_mask": ("Int64", "as stored"),
    "loss_mask": ("Int64", "1 where the model wrote it"),
    "response_mask": ("Int64", "of the response; null before it"),
    "old_log_probs": ("Float64", "of the response, natural logarithm; null before it"),
    "rollout_log_probs": ("Float64", "the same, as the engine that sampled reported it"),
    "entropys": ("Float64", "of the response, in nats; null before it"),
}
"""Name, type in Polars and meaning of each column. Columns that a rollout lacks are null."""

STEPS: Mapping[str, tuple[str, str]] = {
    "step": ("Int64", "t of [T, B], from 0 on"),
    "environment": ("Int64", "b of [T, B], from 0 on"),
    "rewards": ("Float64", "sum over the chunk"),
    "dones": ("Boolean", "whether any of the chunk is"),
    "terminations": ("Boolean", "whether any of the chunk is"),
    "truncations": ("Boolean", "whether any of the chunk is"),
    "prev_logprobs": ("Float64", "sum over the action"),
    "prev_values": ("Float64", "the first of the row"),
    "versions": ("Int64", "the first of the row"),
    "valid": ("Boolean", "whether draws and counts include the step"),
}
"""Name, type in Polars and meaning of each column. Columns that a block lacks are null."""

Reader = Callable[[IntArray, list[str]], tuple[IntArray, dict[str, "pl.Series"]]]


def read_tokens(
    locked: Locked, ids: IntArray, names: Sequence[str], late: Mapping[str, bool]
) -> tuple[IntArray, dict[str, pl.Series]]:
    """Return the number of tokens of each rollout, ``[n]``, and columns of all tokens.

    Args:
        locked: gives access to the contents.
        ids: ids of the rollouts.
        names: names of the columns.
        late: those that are values by row, and whether each is a list.

    Raises:
        TrajectoryUnavailableError: a rollout was evicted meanwhile.
        CorruptStoreError, OSError: a rollout is unreadable.
    """

    def values_of(name: str, rows: torch.Tensor) -> pl.Series:
        return pl.Series(name, rows.to(torch.float64 if TOKENS[name][0] == "Float64" else torch.int64).numpy())

    def read(ids: IntArray, stored: list[str]) -> tuple[IntArray, dict[str, pl.Series]]:
        found = locked(lambda contents: token_rows(contents, positions_of(contents, ids), stored))
        try:
            lengths, total = found.lengths, int(found.lengths.sum())
            starts = np.cumsum(lengths) - lengths
            position = np.arange(total) - np.repeat(starts, lengths)
            before = pl.Series(position < np.repeat(lengths - found.responses, lengths))
            columns = _columns(names, late, TOKENS, {"position": position}, found.copy(starts, total), values_of)
            response = [
                name for name, stored in zip(names, _stored_as(names, late), strict=True) if stored in found.of_response
            ]
            return lengths, columns | {name: columns[name].set(before, None) for name in response}
        finally:
            found.end()

    return _in_runs(locked, ids, _stored_as(names, late), read)


def _stored_as(names: Sequence[str], late: Mapping[str, bool]) -> list[str]:
    """Return the names that batches use for these columns."""
    return [COLUMNS + name if name in late else name for name in names]


def _columns(
    names: Sequence[str],
    late: Mapping[str, bool],
    kinds: Mapping[str, tuple[str, str]],
    own: Mapping[str, npt.NDArray[np.generic]],
    tensors: Mapping[str, torch.Tensor],
    values_of: Callable[[str, torch.Tensor], pl.Series],
) -> dict[str, pl.Series]:
    """Return columns: those of ``own``, and of tensors those stored; null where there is neither.

    Args:
        names: names of the columns.
        late: those that are values by row, and whether each is a list.
        kinds: the others.
        own: columns of all rows that are not stored; at least one.
        tensors: rows of the stored columns.
        values_of: returns the values of a stored column.
    """
    columns = {}
    count = len(next(iter(own.values())))
    for name, stored in zip(names, _stored_as(names, late), strict=True):
        if name in own:
            columns[name] = pl.Series(name, own[name])
        elif stored not in tensors:
            several = pl.List(pl.Float64) if late.get(name) else pl.Float64
            columns[name] = pl.Series(name, [None] * count, several if name in late else getattr(pl, kinds[name][0]))
        else:
            rows = tensors[stored]
            columns[name] = _late_values(name, rows, late[name]) if name in late else values_of(name, rows)
    return columns


def _late_values(name: str, rows: torch.Tensor, several: bool) -> pl.Series:
    """Return values by row as numbers or lists; a complex number becomes two numbers."""
    flat = rows.unsqueeze(-1).flatten(1)
    numbers = (torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat).to(torch.float64).numpy()
    if several:
        return pl.Series(name, numbers if numbers.shape[1] else [[]] * len(numbers)).cast(pl.List(pl.Float64))
    return pl.Series(name, numbers[:, 0])


def given_late(contents: Contents, kind: str) -> dict[str, bool]:
    """Return the values by row of trajectories of a kind, and whether a row has several numbers.

    Call with the lock of the contents held.
    """
    several: dict[str, bool] = {}
    for name in contents.index.row_notes:
        slots = contents.index[NOTE_ROWS + name]
        schemas = [contents.addresses.schema(slot) for slot in np.unique(slots[slots != UNAVAILABLE]).tolist()]
        columns = [column_named(schema, name) for schema in schemas if schema.kind == kind]
        if columns:
            several[name] = any(math.prod(c.row_shape) * (1 + c.torch_dtype.is_complex) != 1 for c in columns)
    return several


def read_steps(
    locked: Locked, ids: IntArray, names: Sequence[str], late: Mapping[str, bool]
) -> tuple[IntArray, dict[str, pl.Series]]:
    """Return the number of steps of each block, ``[n]`` (T * B), and columns of all steps, without the extra rows.

    Args:
        locked: gives access to the contents.
        ids: ids of the blocks.
        names: names of the columns.
        late: those that are values by row, and whether each is a list.

    Raises:
        TrajectoryUnavailableError: a block was evicted meanwhile.
        CorruptStoreError, OSError: a block is unreadable.
    """

    def read(ids: IntArray, stored: list[str]) -> tuple[IntArray, dict[str, pl.Series]]:
        sizes, batches, within, valid, prepared = locked(
            lambda contents: _found(contents, positions_of(contents, ids), stored)
        )
        step, environment = np.divmod(within, np.repeat(batches, sizes)) if len(within) else (within, within)
        own = {
            "step": step,
            "environment": environment,
            VALID: np.ones(len(within), np.bool_) if valid is None else valid,
        }
        return sizes, _columns(names, late, STEPS, own, {} if prepared is None else prepared.read(None), _step_values)

    return _in_runs(locked, ids, [name for name in _stored_as(names, late) if name != VALID], read)


def _found(
    contents: Contents, positions: IntArray, stored: list[str]
) -> tuple[IntArray, IntArray, IntArray, npt.NDArray[np.bool_] | None, RowPlan | None]:
    """Return the rows of blocks; call with the lock held.

    Returns:
        Number of rows and B of each block; of each row its number, whether it is valid (None: all are), and a plan.
    """
    index = contents.index
    steps, batches = (index.at(name, positions).astype(np.int64) for name in ("steps", "batch"))
    sizes = steps * batches
    rows, of_each = (
        np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes),
        np.repeat(positions, sizes),
    )
    valid = contents.are_valid(of_each, rows)
    if not sizes.sum() or not stored:
        contents.schemas(positions)  # unreadable blocks must raise, whichever columns are requested
        return sizes, batches, rows, valid, None
    return sizes, batches, rows, valid, contents.plan(of_each, rows, int(positions.min()), stored)


def _step_values(name: str, rows: torch.Tensor) -> pl.Series:
    """Return one value per row of a column; null for an empty row or a fraction in an integer column."""
    dtype = getattr(pl, STEPS[name][0])
    flat = rows.reshape(len(rows), -1)
    values: torch.Tensor | list[None]
    if STEPS[name][0] == "Boolean":
        values = (flat != 0).any(dim=1)
    elif name in ("rewards", "prev_logprobs"):
        values = flat.to(torch.float64).sum(dim=1)
    elif flat.shape[1]:
        values = flat[:, 0].to(torch.float64) if flat.is_floating_point() else flat[:, 0]
    else:
        values = [None] * len(flat)
    column: pl.Series = pl.Series(name, values.numpy() if isinstance(values, torch.Tensor) else values)
    return column.cast(dtype, strict=False)


def _in_runs(
    locked: Locked, ids: IntArray, names: Sequence[str], read: Reader
) -> tuple[IntArray, dict[str, pl.Series]]:
    """Read adjacent trajectories together if they store the same columns with equal dtypes and shapes.

    Args:
        locked: gives access to the contents.
        ids: ids of the trajectories.
        names: names of the columns.
        read: takes ids and the columns that these trajectories store.
    """
    stored = locked(lambda contents: _stored(contents, positions_of(contents, ids), frozenset(names)))
    runs = []
    for columns, at in groupby(range(len(ids)), lambda at: stored[at]):
        runs.append(read(ids[list(at)], [name for name, *_ in columns]))
    counts = np.concatenate([counts for counts, _ in runs])
    return counts, {name: pl.concat([columns[name] for _, columns in runs]) for name in runs[0][1]}


def _stored(contents: Contents, positions: IntArray, names: frozenset[str]) -> list[tuple[tuple[object, ...], ...]]:
    """Return the stored columns of each trajectory with dtype and shape; call with the lock held."""
    index = contents.index
    plain, late = without_notes(sorted(names))
    by_name: list[tuple[str | None, IntArray, Sequence[str]]] = [(None, index.at("slot", positions), plain or ())]
    by_name += [
        (name, index.at(NOTE_ROWS + name.removeprefix(COLUMNS), positions), (name.removeprefix(COLUMNS),))
        for name in late
        if name.removeprefix(COLUMNS) in index.row_notes
    ]
    stored: list[tuple[tuple[object, ...], ...]] = [()] * len(positions)
    for name, slots, wanted in by_name:
        of_slot: dict[int, tuple[tuple[object, ...], ...]] = {UNAVAILABLE: ()}
        for slot in np.unique(slots[slots != UNAVAILABLE]).tolist():
            columns = contents.addresses.schema(slot).columns
            of_slot[slot] = tuple(sorted((name or c.name, c.dtype, c.row_shape) for c in columns if c.name in wanted))
        stored = [(*before, *of_slot[slot]) for before, slot in zip(stored, slots.tolist(), strict=True)]
    return stored
