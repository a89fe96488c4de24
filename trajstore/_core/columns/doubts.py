"""Finds rollouts that can be stored and are certainly wrong: contradicting masks, log-probs above 0. Pure.

A store keeps such a rollout, which may be the only result of an expensive generation, and warns the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import Block

_HALF = (torch.bfloat16, torch.float16)
_COMPARED = (*_HALF, torch.float32, torch.float64)  # torch has no minimum for some of the other dtypes

_LOG_PROBS = ("old_log_probs", "rollout_log_probs")
_CHECKED = frozenset(("input_ids", "response_mask", "loss_mask", *_LOG_PROBS))


def doubts(block: Block, extents: npt.NDArray[np.int64], starts: Sequence[int | None]) -> Mapping[int, list[str]]:
    """Return the certain problems of rollouts that can be stored, by position, as ends of "rollouts with ...".

    Args:
        block: the rollouts.
        extents: steps, batch, extra rows and document bytes of each.
        starts: ``response_start`` of each.
    """
    tokens, responses = ([0, *accumulate(rows)] for rows in (extents[:, 0].tolist(), extents[:, 2].tolist()))
    ends = {Axis.SAMPLES: tokens, Axis.RESPONSE: responses}
    checked = [(at, column) for at, column in enumerate(block.schema.columns) if column.name in _CHECKED]
    places = {column.name: (at, ends[column.axis]) for at, column in checked}

    def columns(first: int, last: int) -> dict[str, torch.Tensor]:
        return {name: block.rows(at, rows[first], rows[last]) for name, (at, rows) in places.items()}

    count = len(extents)
    begins = [start for start in starts if start is not None]
    if len(begins) == count:  # one check for all costs little more than for one
        joined = columns(0, count)
        if "loss_mask" in joined:
            both = zip(begins, extents[:, 0].tolist(), strict=True)
            sizes = [size for begin, rows in both for size in (begin, rows - begin)]
            joined["loss_mask"] = torch.cat(joined["loss_mask"].split_with_sizes(sizes)[1::2])
        if not any(_problems(joined, True)):
            return {}
    found = {}
    for at, start in enumerate(starts):
        of_one = columns(at, at + 1)
        if start and "loss_mask" in of_one:
            of_one["loss_mask"] = of_one["loss_mask"][start:]
        if problems := [*_problems(of_one, start is not None)]:
            found[at] = problems
    return found


def _problems(columns: Mapping[str, torch.Tensor], cut: bool) -> Iterator[str]:
    """Yield the problems of a rollout, or of several that are joined; ``cut``: the loss mask is the response's."""
    ids, mask, written = columns.get("input_ids"), columns.get("response_mask"), columns.get("loss_mask")
    if ids is not None and ids.shape[0] and ids.dtype.is_signed and ids.min().item() < 0:
        yield "negative token ids in input_ids"
    if written is not None and mask is not None and cut and not _equal_masks(written, mask):
        yield "a response_mask that is not loss_mask[response_start:]"
    on_model = written if mask is None else mask
    for name in _LOG_PROBS:
        log_probs = columns.get(name)
        if log_probs is None or _possible(log_probs):
            continue
        if on_model is None or on_model.shape[0] != log_probs.shape[0] or not _possible(log_probs[on_model.bool()]):
            yield f"{name} that are above 0 or not finite where the model wrote"


def _equal_masks(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two masks are true in the same places."""
    if one.dtype is other.dtype and torch.equal(one, other):  # the usual case, without two copies
        return True
    return torch.equal(one.bool(), other.bool())


def _possible(log_probs: torch.Tensor) -> bool:
    """Return whether these can be log-probabilities, within the precision of their dtype."""
    if not log_probs.shape[0]:
        return True
    wide = log_probs if log_probs.dtype in _COMPARED else log_probs.double()
    low, high = torch.aminmax(wide)
    return bool(high.item() <= _most(log_probs.dtype) and low.item() > -math.inf)  # NaN fails both


@cache
def _most(dtype: torch.dtype) -> float:
    """Return the largest rounding error of the logarithm of 1 in a dtype."""
    most = torch.tensor(0.1 if dtype in _HALF else 1e-3, dtype=dtype if dtype in _COMPARED else torch.float64)
    return float(most.item())
