"""Converts the token columns of a step's rows to those of trajectories, many rows at once. Pure.

A step has thousands of rows of a few kilobytes, for which the overhead of a torch call dominates. So the columns of
many rows are concatenated, converted once, and split again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_hooks.replay.compact import small_ids, small_mask

_AT_ONCE = 1 << 15
"""Tokens per conversion: small enough for the CPU cache, and for torch not to use other threads."""


@dataclass(slots=True)
class Tokens:
    """Token columns of a row, copied; L = prompt and response, R = response."""

    input_ids: Tensor
    """[L]"""
    loss_mask: Tensor
    """[L]"""
    prompt: int
    """Tokens of the prompt."""
    response_mask: Tensor
    """[R]"""
    old_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    entropys: Tensor | None
    """[R] each."""
    entropy: float | None
    """Mean over the model's tokens."""
    score: float | None
    """Sum of the row's scores; ``None`` without scores."""
    scores: list[list[Any]]
    """Nonzero scores: ``[[position in the response, score], ...]``."""


def tokens_of(columns: Sequence[Mapping[str, Any]]) -> list[Tokens]:
    """Return the tokens of rows.

    Args:
        columns: columns of each row: ``prompts``, ``responses``, ``response_mask``; optionally ``old_log_probs``,
            ``rollout_log_probs``, ``entropy`` and ``rm_scores``, with the response's length. Not changed.
    """
    made: list[Tokens] = []
    some: list[Mapping[str, Any]] = []
    count = 0
    for row in columns:
        length = row["prompts"].numel() + row["responses"].numel()
        if some and count + length > _AT_ONCE:
            made += _together(some)
            some, count = [], 0
        some.append(row)
        count += length
    return made + _together(some) if some else made


def _together(columns: Sequence[Mapping[str, Any]]) -> list[Tokens]:
    prompts, responses, masks = ([row[name] for row in columns] for name in ("prompts", "responses", "response_mask"))
    starts, lengths = _lengths(prompts), _lengths(responses)
    small = small_mask(torch.cat(masks))
    parted = torch.split(small, lengths)
    whole = [start + length for start, length in zip(starts, lengths, strict=True)]
    ids = torch.split(small_ids(torch.cat(_alternating(prompts, responses))), whole)
    nothing = torch.split(torch.zeros(sum(starts), dtype=small.dtype), starts)
    loss_masks = torch.split(torch.cat(_alternating(nothing, parted)), whole)
    old, engine, entropys, scores = (
        _own([row.get(name) for row in columns])
        for name in ("old_log_probs", "rollout_log_probs", "entropy", "rm_scores")
    )
    means = _means(entropys, parted)
    sums_and_scores = scores_of(scores)
    return [
        Tokens(*columns)
        for columns in zip(ids, loss_masks, starts, parted, old, engine, entropys, means, *sums_and_scores, strict=True)
    ]


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _alternating(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for pair in zip(first, second, strict=True) for tensor in pair]


def _of_those_that_have(values: Sequence[Tensor | None], change: Callable[[list[Tensor]], Sequence[Any]]) -> list[Any]:
    """Apply ``change`` to the list of present tensors; return its results in place, ``None`` where absent."""
    held = [value for value in values if value is not None]
    made = iter(change(held) if held else ())
    return [None if value is None else next(made) for value in values]


def _own(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return copies of the tensors, in one block of memory."""
    return _of_those_that_have(values, lambda held: torch.split(torch.cat(held), _lengths(held)))


def _means(entropys: Sequence[Tensor | None], masks: Sequence[Tensor]) -> list[float | None]:
    """Return the mean of each row's entropies where its mask is 1; ``None`` if it is not finite."""
    masked = iter([mask for mask, values in zip(masks, entropys, strict=True) if values is not None])

    def means(held: list[Tensor]) -> list[float | None]:
        counted = (torch.cat(list(masked)) == 1).numpy()
        values = np.where(counted, torch.cat(held).double().numpy(), 0.0)
        # Per row: a mean must not depend on neighbouring rows, whose order varies.
        lengths = np.array(_lengths(held))
        some = lengths > 0
        starts = (np.cumsum(lengths) - lengths)[some]
        sums, counts = np.zeros(len(held)), np.zeros(len(held))
        if len(starts):
            sums[some], counts[some] = (
                np.add.reduceat(column, starts) for column in (values, counted.astype(np.float64))
            )
        return [
            mean if count and math.isfinite(mean := total / count) else None
            for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
        ]

    return _of_those_that_have(entropys, means)


def scores_of(columns: Sequence[Tensor | None]) -> tuple[list[float | None], list[list[list[Any]]]]:
    """Return the sum of each row's scores, and the positions and values of nonzero scores."""
    places: list[list[list[Any]]] = [[] for _ in columns]
    rows = [number for number, column in enumerate(columns) if column is not None]
    held = [column for column in columns if column is not None]
    if not held:
        return [None] * len(columns), places
    joined = torch.cat(held)
    flat = (joined.float() if joined.dtype == torch.bfloat16 else joined).numpy()  # numpy has no bfloat16
    nonzero = np.flatnonzero(flat)
    ends = np.cumsum(_lengths(held))
    row_of = np.searchsorted(ends, nonzero, side="right")
    for row, place, value in zip(row_of.tolist(), nonzero.tolist(), flat[nonzero].tolist(), strict=True):
        before = int(ends[row - 1]) if row else 0
        places[rows[row]].append([place - before, value])
    sums: list[float | None] = [None] * len(columns)
    for row, column in zip(rows, held, strict=True):
        given = places[row]
        # Summed like verl, in the column's precision.
        sums[row] = float(given[0][1]) if len(given) == 1 else float(column.sum()) if given else 0.0
    return sums, places
