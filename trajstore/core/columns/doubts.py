"""Finds rollouts that can be stored and are certainly wrong: contradicting masks, log-probs above 0. Pure.

A store keeps such a rollout, which may be the only result of an expensive generation, and warns the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from trajstore.core.columns.flat import FlatTrajectory

_HALF = (torch.bfloat16, torch.float16)
_COMPARED = (*_HALF, torch.float32, torch.float64)  # torch has no minimum for some of the other dtypes


def doubts(rollout: FlatTrajectory, response_start: int | None) -> Iterator[str]:
    """Yield each certain problem of a rollout that can be stored, as the end of "rollouts with ..."."""
    columns = dict(zip((column.name for column in rollout.schema.columns), rollout.tensors, strict=True))
    ids, mask, written = columns.get("input_ids"), columns.get("response_mask"), columns.get("loss_mask")
    if ids is not None and ids.shape[0] and ids.dtype.is_signed and ids.min().item() < 0:
        yield "negative token ids in input_ids"
    if written is not None and response_start is not None:
        written = written[response_start:]
        if mask is not None and not _equal_masks(written, mask):
            yield "a response_mask that is not loss_mask[response_start:]"
    on_model = written if mask is None else mask
    for name in ("old_log_probs", "rollout_log_probs"):
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
