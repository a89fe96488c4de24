"""Compact storage of token ids and masks, and the way back to ``int64``. Pure."""

from __future__ import annotations

import dataclasses

import torch

from trajstore.trajectory import AgentTrajectory

_MASKS = ("attention_mask", "loss_mask", "response_mask")
_LARGEST = torch.iinfo(torch.int32).max


def with_small_columns(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory with masks of zeros and ones as ``uint8``, and 64-bit token ids as ``int32``.

    This takes 5 bytes a token instead of 16, and 1 instead of 8 for each token of the response. Columns with other
    values are kept unchanged. Other tensors are shared. The inverse is :func:`with_usual_columns`.
    """
    small = dataclasses.replace(trajectory)
    for name in _MASKS:
        if (mask := getattr(trajectory, name)) is not None:
            setattr(small, name, small_mask(mask))
    if trajectory.input_ids is not None:
        small.input_ids = small_ids(trajectory.input_ids)
    return small


def with_usual_columns(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory with masks and token ids as ``int64``. Other tensors are shared."""
    usual = dataclasses.replace(trajectory)
    for name in ("input_ids", *_MASKS):
        if (column := getattr(trajectory, name)) is not None:
            setattr(usual, name, column.long())
    return usual


def small_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of zeros and ones as ``uint8``; a mask with other values unchanged."""
    if mask.dtype == torch.uint8:
        return mask
    if mask.dtype == torch.int64 and mask.numel():
        low, high = torch.aminmax(mask)  # a third of the time of two comparisons
        return mask.to(torch.uint8) if int(low) >= 0 and int(high) <= 1 else mask
    return mask.to(torch.uint8) if bool(((mask == 0) | (mask == 1)).all()) else mask


def small_ids(ids: torch.Tensor) -> torch.Tensor:
    """Return 64-bit token ids as ``int32`` if they fit."""
    if ids.dtype != torch.int64 or not ids.numel():
        return ids
    low, high = torch.aminmax(ids)
    return ids.to(torch.int32) if int(low) >= 0 and int(high) <= _LARGEST else ids
