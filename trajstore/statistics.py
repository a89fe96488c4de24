"""What can be said in numbers about trajectories: ranges, rewards, episodes. Pure; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.fields import Axis, axis_of, skip_extra_rows

Range = dict[str, float]


def range_of(values: npt.ArrayLike) -> Range | None:
    """Return ``{"min", "mean", "max"}`` of the finite values; None if there are none."""
    array = np.asarray(values)
    array = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    if not array.size:
        return None
    return {"min": array.min().item(), "mean": float(array.mean(dtype=np.float64)), "max": array.max().item()}


def id_gaps(ids: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return inclusive ranges of ids between the lowest and the highest that are not there."""
    ordered = np.sort(ids)
    after = np.flatnonzero(np.diff(ordered) > 1)
    return [[int(ordered[i]) + 1, int(ordered[i + 1]) - 1] for i in after]


@dataclass
class RewardStatistics:
    """Rewards and episodes, gathered trajectory by trajectory.

    An episode is counted where it ends. One that began in an earlier trajectory is counted from the
    start of this one: nothing says which trajectory that was.
    """

    count: int = 0
    total: float = 0.0
    total_of_squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    lengths: list[int] = field(default_factory=list)
    """Steps of each ended episode."""
    returns: list[float] = field(default_factory=list)
    """Sum of the rewards of each ended episode, all C of a chunk step."""

    def add(self, rewards: torch.Tensor, dones: torch.Tensor | None) -> None:
        """Take a trajectory: rewards ``[T, B, C]``, dones ``[T or T + E, B, C]``."""
        per_step = rewards.to(torch.float64)
        steps, batch = per_step.shape[:2]
        if per_step.numel():
            self.count += per_step.numel()
            self.total += float(per_step.sum())
            self.total_of_squares += float(per_step.square().sum())
            self.lowest = min(self.lowest, float(per_step.min()))
            self.highest = max(self.highest, float(per_step.max()))
        if dones is None or not steps or not batch:
            return
        ended = sampled_rows(dones.bool(), steps, "dones").reshape(steps, batch, -1).any(dim=-1).numpy()
        sums = np.concatenate(
            [np.zeros((1, batch)), per_step.reshape(steps, batch, -1).sum(dim=-1).cumsum(dim=0).numpy()]
        )
        for column in range(batch):
            ends = np.flatnonzero(ended[:, column]) + 1
            starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
            self.lengths.extend((ends - starts).tolist())
            self.returns.extend((sums[ends, column] - sums[starts, column]).tolist())

    def rewards_report(self) -> Range | None:
        """Return ``{"min", "mean", "max", "std", "count"}`` of single rewards; None without rewards."""
        if not self.count:
            return None
        mean = self.total / self.count
        variance = max(0.0, self.total_of_squares / self.count - mean * mean)
        return {
            "min": self.lowest,
            "mean": mean,
            "max": self.highest,
            "std": math.sqrt(variance),
            "count": self.count,
        }

    def episodes_report(self) -> dict[str, Any] | None:
        """Return ``{"ended", "length", "return"}``; None if none ended."""
        if not self.lengths:
            return None
        return {"ended": len(self.lengths), "length": range_of(self.lengths), "return": range_of(self.returns)}


def sampled_rows(values: torch.Tensor, steps: int, name: str) -> torch.Tensor:
    """Return the ``[T, B, ...]`` rows of a field that may have ``T + E``.

    Raises:
        InvalidTrajectoryError: its length fits neither.
    """
    axis, extra = axis_of(name, values.shape[0], steps)
    if axis is Axis.SAMPLES:
        return values
    rows = [skip_extra_rows(axis, step, 1, steps // extra) for step in range(steps)]
    return values[rows]


def policy_report(lows: Sequence[int], highs: Sequence[int], weights: Iterable[str], unknown: int) -> dict[str, Any]:
    """Return versions, ages (newest version minus a trajectory's lowest) and the number of different weights.

    Args:
        lows: lowest version of each trajectory that knows its version.
        highs: highest version of the same trajectories.
        weights: ``model_weights_id`` of all trajectories.
        unknown: number of trajectories without a version.
    """
    versions = None
    ages = None
    if len(lows):
        newest = max(highs)
        versions = {"min": min(lows), "max": newest}
        ages = range_of([newest - low for low in lows])
    return {"versions": versions, "ages": ages, "unknown": unknown, "weights": len(set(weights) - {""})}


def tensor_report(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return name, dtype, shape, bytes, range and the number of values that are not finite."""
    report: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "range": None,
        "not_finite": 0,
    }
    if tensor.is_complex() or not tensor.numel():
        return report
    values = tensor.to(torch.float64)
    finite = torch.isfinite(values)
    report["not_finite"] = int((~finite).sum())
    report["range"] = range_of(values[finite].numpy())
    return report
