"""The columns of two trajectories compared: shapes, and how far values lie apart. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]
Columns = Mapping[str, torch.Tensor]
Rollout = tuple[Columns, AgentTrajectory]
"""Columns of a rollout, and the rollout."""


def column_difference(left: Columns, right: Columns) -> list[Report]:
    """Return what differs between columns of the same name.

    Returns:
        For each column ``name``, ``left`` and ``right`` (``dtype`` and ``shape``, None where it is absent),
        ``differs``, and where both have one shape ``differing`` (how many values; NaN equals NaN), ``values`` (how many
        there are), ``first`` (where the first one is: step and environment, or the row), ``largest`` (of the finite
        differences; None if there is none) and ``not_finite`` (values that differ and are not finite on one side).
    """
    found = []
    for name in dict.fromkeys((*left, *right)):
        a, b = left.get(name), right.get(name)
        report: Report = {"name": name, "left": _kind(a), "right": _kind(b), "differs": _kind(a) != _kind(b)}
        if a is not None and b is not None and a.shape == b.shape:
            report |= _apart(a, b)
            report["differs"] = report["differs"] or bool(report["differing"])
        found.append(report)
    return found


def rows_along_tokens(left: Rollout, right: Rollout, count: int) -> tuple[Columns, Columns]:
    """Return of the columns of two rollouts the rows that belong to the first ``count`` tokens, which both have.

    Columns of the response are taken from where the response of both has begun. A column along neither tokens nor
    response is left as it is.
    """
    starts = [rollout.response_start for _, rollout in (left, right) if rollout.response_start is not None]
    first = min(max(starts, default=0), count)
    return _rows(*left, first, count), _rows(*right, first, count)


def _rows(columns: Columns, rollout: AgentTrajectory, first: int, count: int) -> Columns:
    total = 0 if rollout.input_ids is None else len(rollout.input_ids)
    start = rollout.response_start
    found = dict(columns)
    for name, tensor in columns.items():
        if tensor.ndim and len(tensor) == total:
            found[name] = tensor[:count]
        elif tensor.ndim and start is not None and start + len(tensor) == total:
            found[name] = tensor[max(0, first - start) : max(0, count - start)]
    return found


def _kind(tensor: torch.Tensor | None) -> Report | None:
    return None if tensor is None else {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _apart(a: torch.Tensor, b: torch.Tensor) -> Report:
    report: Report = {"values": a.numel(), "differing": 0, "first": None, "largest": None, "not_finite": 0}
    if a.dtype != b.dtype:
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    unlike = a != b
    if a.is_floating_point() or a.is_complex():
        unlike &= ~(torch.isnan(a) & torch.isnan(b))
    report["differing"] = int(unlike.sum())
    if report["differing"]:
        first = np.unravel_index(int(unlike.reshape(-1).numpy().argmax()), tuple(a.shape))
        report["first"] = [int(number) for number in first[:2]]
        apart = _distances(a[unlike], b[unlike])
        finite = apart[torch.isfinite(apart)]
        report["not_finite"] = len(apart) - len(finite)
        report["largest"] = finite.max().item() if len(finite) else None
    return report


def _distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``|a - b|``; of whole numbers too far apart for 64 bits, rounded."""
    if a.is_complex():
        return (a.to(torch.complex128) - b.to(torch.complex128)).abs()
    far = a.double() - b.double()
    if a.is_floating_point():
        return far.abs()
    return torch.where(far.abs() < 2.0**62, (a.long() - b.long()).abs().double(), far.abs())
