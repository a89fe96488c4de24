"""Tokens of rollouts and steps of blocks as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from trajstore.querying.engine import polars
from trajstore.querying.readable import IntArray, Locked, positions_of
from trajstore.reading.batch import Prepared
from trajstore.reading.contents import Contents
from trajstore.reading.tokens import TokenRows, token_rows
from trajstore.trajectory import RESPONSE_COLUMNS

if TYPE_CHECKING:
    from polars import Series

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
"""Name, type in Polars and meaning of each column. What a rollout does not have is null."""

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
}
"""Name, type in Polars and meaning of each column. What a block does not have is null."""

Reader = Callable[[IntArray, list[str]], tuple[IntArray, dict[str, "Series"]]]


def read_tokens(locked: Locked, ids: IntArray, names: Sequence[str]) -> tuple[IntArray, dict[str, Series]]:
    """Return how many tokens each rollout has, ``[n]``, and columns of all of them.

    Raises:
        TrajectoryUnavailableError: one has been evicted meanwhile.
        CorruptStoreError, OSError: one cannot be read.
    """

    def read(ids: IntArray, stored: list[str]) -> tuple[IntArray, dict[str, Series]]:
        found = locked(lambda contents: token_rows(contents, positions_of(contents, ids), stored))
        try:
            return found.lengths, _columns_of(found, names)
        finally:
            found.end()

    return _in_runs(locked, ids, [name for name in names if name != "position"], read)


def _columns_of(found: TokenRows, names: Sequence[str]) -> dict[str, Series]:
    pl = polars()
    lengths, total = found.lengths, int(found.lengths.sum())
    starts = np.cumsum(lengths) - lengths
    position = np.arange(total) - np.repeat(starts, lengths)
    before = position < np.repeat(lengths - found.responses, lengths)
    tensors = found.copy(starts, total)
    columns = {}
    for name in names:
        dtype = getattr(pl, TOKENS[name][0])
        if name == "position":
            columns[name] = pl.Series(name, position, dtype=dtype)
        elif name in tensors:
            values = pl.Series(name, _numpy(tensors[name], TOKENS[name][0]), dtype=dtype)
            columns[name] = values.set(pl.Series(before), None) if name in RESPONSE_COLUMNS else values
        else:
            columns[name] = pl.Series(name, [None] * total, dtype=dtype)
    return columns


def read_steps(locked: Locked, ids: IntArray, names: Sequence[str]) -> tuple[IntArray, dict[str, Series]]:
    """Return how many steps each block has, ``[n]`` (T * B), and columns of all of them, without the extra rows.

    Raises:
        TrajectoryUnavailableError: one has been evicted meanwhile.
        CorruptStoreError, OSError: one cannot be read.
    """
    pl = polars()

    def read(ids: IntArray, stored: list[str]) -> tuple[IntArray, dict[str, Series]]:
        sizes, batches, prepared = locked(lambda contents: _found(contents, positions_of(contents, ids), stored))
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        step, environment = np.divmod(within, np.repeat(batches, sizes)) if len(within) else (within, within)
        tensors = {} if prepared is None else prepared.read(None)
        columns = {}
        for name in names:
            dtype = getattr(pl, STEPS[name][0])
            if name in ("step", "environment"):
                columns[name] = pl.Series(name, step if name == "step" else environment, dtype=dtype)
            elif name in tensors:
                columns[name] = _step_values(name, tensors[name])
            else:
                columns[name] = pl.Series(name, [None] * len(within), dtype=dtype)
        return sizes, columns

    return _in_runs(locked, ids, [name for name in names if name not in ("step", "environment")], read)


def _found(contents: Contents, positions: IntArray, stored: list[str]) -> tuple[IntArray, IntArray, Prepared | None]:
    """Return samples and B of blocks, and the rows of all of their samples; with the lock held."""
    index = contents.index
    sizes, batches = (index.at(name, positions).astype(np.int64) for name in ("num_samples", "batch"))
    if not sizes.sum() or not stored:
        contents.make_resident(positions)  # what cannot be read has no rows, whichever columns are asked for
        contents.forget_decoded()
        return sizes, batches, None
    first = int(positions.min())
    begins = index.ends[positions] - sizes - index.samples_before(first)
    samples = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    return sizes, batches, contents.prepare(samples, first, int(positions.max()) + 1, stored)


def _step_values(name: str, rows: torch.Tensor) -> Series:
    """Return one value for each row of a column; null where it is an empty row, or no whole number that must be one."""
    dtype = getattr(polars(), STEPS[name][0])
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
    column: Series = polars().Series(name, values.numpy() if isinstance(values, torch.Tensor) else values)
    return column.cast(dtype, strict=False)


def _numpy(tensor: torch.Tensor, dtype: str) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.generic] = tensor.to(torch.float64 if dtype == "Float64" else torch.int64).numpy()
    return values


def _in_runs(locked: Locked, ids: IntArray, names: Sequence[str], read: Reader) -> tuple[IntArray, dict[str, Series]]:
    """Read trajectories that lie behind each other and store the same of some columns together.

    Args:
        locked: gives access to the contents.
        ids: of the trajectories.
        names: of the columns.
        read: is given ids, and which of the columns these have.
    """
    pl = polars()
    stored = locked(lambda contents: _stored(contents, positions_of(contents, ids), frozenset(names)))
    runs = []
    for columns, at in groupby(range(len(ids)), lambda at: stored[at]):
        runs.append(read(ids[list(at)], [name for name, *_ in columns]))
    counts = np.concatenate([counts for counts, _ in runs])
    return counts, {name: pl.concat([columns[name] for _, columns in runs]) for name in runs[0][1]}


def _stored(contents: Contents, positions: IntArray, names: frozenset[str]) -> list[tuple[tuple[object, ...], ...]]:
    """Return which of some columns each trajectory has, with dtype and shape; with the lock held."""
    slots = contents.index.at("slot", positions)
    of_slot = {}
    for slot in np.unique(slots).tolist():
        columns = contents.schema_of(slot).columns
        of_slot[slot] = tuple(sorted((c.name, c.dtype, c.row_shape) for c in columns if c.name in names))
    return [of_slot[slot] for slot in slots.tolist()]
