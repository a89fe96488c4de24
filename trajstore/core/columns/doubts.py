"""Finds rollouts that can be stored and are certainly wrong: contradicting masks, log-probs above 0. Pure.

A store keeps such a rollout, which may be the only result of an expensive generation, and warns the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch

from trajstore.core.columns.flat import FlatTrajectory
from trajstore.core.columns.schema import Schema

_HALF = (torch.bfloat16, torch.float16)
_COMPARED = (*_HALF, torch.float32, torch.float64)  # torch has no minimum for some of the other dtypes

_LOG_PROBS = ("old_log_probs", "rollout_log_probs")
_CHECKED = frozenset(("input_ids", "response_mask", "loss_mask", *_LOG_PROBS))

_TOGETHER = 1 << 16
"""Mean bytes of rollouts up to which they are checked together: joining them costs less than a check for each."""


def doubts(rollouts: Sequence[FlatTrajectory], starts: Sequence[int | None]) -> list[list[str]]:
    """Return the certain problems of each of some rollouts that can be stored, as ends of "rollouts with ...".

    Args:
        rollouts: the rollouts.
        starts: ``response_start`` of each.
    """
    begins = [int(start) for start in starts if start is not None]
    if len(begins) == len(rollouts) > 1:
        schema = rollouts[0].schema
        small = sum([rollout.nbytes for rollout in rollouts]) <= _TOGETHER * len(rollouts)
        if small and {id(rollout.schema) for rollout in rollouts} == {id(schema)}:
            places = _places(schema).items()
            joined = {name: torch.cat([rollout.tensors[at] for rollout in rollouts]) for name, at in places}
            if "loss_mask" in joined:
                tokens = [rollout.extent.steps for rollout in rollouts]
                sizes = [size for at, begin in enumerate(begins) for size in (begin, tokens[at] - begin)]
                joined["loss_mask"] = torch.cat(joined["loss_mask"].split_with_sizes(sizes)[1::2])
            if not any(_problems(joined, True)):
                return [[] for _ in rollouts]
    return [_problems_of(rollout, start) for rollout, start in zip(rollouts, starts, strict=True)]


def _problems_of(rollout: FlatTrajectory, start: int | None) -> list[str]:
    columns = {name: rollout.tensors[at] for name, at in _places(rollout.schema).items()}
    if start and "loss_mask" in columns:
        columns["loss_mask"] = columns["loss_mask"][start:]
    return [*_problems(columns, start is not None)]


def _places(schema: Schema) -> dict[str, int]:
    """Return the positions of the checked columns."""
    return {column.name: at for at, column in enumerate(schema.columns) if column.name in _CHECKED}


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
    if log_probs.is_complex():
        return False
    wide = log_probs if log_probs.dtype in _COMPARED else log_probs.double()
    low, high = torch.aminmax(wide)
    return bool(high.item() <= _most(log_probs.dtype) and low.item() > -math.inf)  # NaN fails both


@cache
def _most(dtype: torch.dtype) -> float:
    """Return the largest rounding error of the logarithm of 1 in a dtype."""
    most = torch.tensor(0.1 if dtype in _HALF else 1e-3, dtype=dtype if dtype in _COMPARED else torch.float64)
    return float(most.item())
