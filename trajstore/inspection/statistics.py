"""What can be said in numbers about trajectories: ranges, rewards, episodes. Pure; no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.columns.fields import Axis, axis_of, skip_extra_rows

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

    An episode is counted where it ends. Whether it began in an earlier trajectory is told by observations: an
    environment whose first one is what another step, at the end of a trajectory, led to, goes on with that episode.
    Without observations an episode is counted from the start of the trajectory in which it ends.
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
    begun_before: int = 0
    """Episodes that ended, but began before the first trajectory that was read; they are in neither list."""
    spanning: int = 0
    """Ended episodes that were put together out of several trajectories."""
    followed: bool = True
    """Whether observations told of all trajectories which episodes go on in them."""
    _open: dict[bytes, tuple[int, float, bool]] = field(default_factory=dict)

    def add(self, rewards: torch.Tensor, dones: torch.Tensor | None, seam: Seam | None = None) -> None:
        """Take a trajectory: rewards ``[T, B, C]``, dones ``[T or T + E, B, C]``, and what joins it to others."""
        per_step = rewards.to(torch.float64).numpy()
        steps, batch = per_step.shape[:2]
        if per_step.size:
            self.count += per_step.size
            self.total += float(per_step.sum())
            self.total_of_squares += float(np.square(per_step).sum())
            self.lowest = min(self.lowest, float(per_step.min()))
            self.highest = max(self.highest, float(per_step.max()))
        if dones is None or not steps or not batch:
            return
        ended = np.any(
            sampled_rows(dones.bool(), steps, "dones").numpy().reshape(steps, batch, -1), axis=-1, keepdims=True
        )
        self._add_episodes(per_step.reshape(steps, batch, -1).sum(axis=-1), ended[..., 0], seam)

    def _add_episodes(self, rewards: npt.NDArray[np.float64], ended: npt.NDArray[np.bool_], seam: Seam | None) -> None:
        """Take rewards and ends of episodes, both ``[T, B]``."""
        steps = len(rewards)
        sums = np.concatenate([[0.0], np.cumsum(rewards.T.ravel())])  # one environment after the other
        ends = np.flatnonzero(ended.T.ravel()) + 1
        column = (ends - 1) // steps
        starts = np.maximum(np.concatenate([[0], ends[:-1]]), column * steps)[: len(ends)]
        lengths, returns = ends - starts, sums[ends] - sums[starts]
        self.followed = self.followed and seam is not None
        if seam is None:
            self.lengths += lengths.tolist()
            self.returns += returns.tolist()
            return
        begun = [self._open.pop(key, (0, 0.0, seam.whole)) for key in seam.first]
        first = dict(zip(column[::-1].tolist(), range(len(ends) - 1, -1, -1), strict=True))  # of each environment
        unknown = []
        for environment, at in first.items():
            length, total, known = begun[environment]
            lengths[at] += length
            returns[at] += total
            self.spanning += bool(length) and known
            if not known:
                unknown.append(at)
        self.begun_before += len(unknown)
        self.lengths += np.delete(lengths, unknown).tolist()
        self.returns += np.delete(returns, unknown).tolist()
        last = dict(zip(column.tolist(), ends.tolist(), strict=True))
        clear = Counter(seam.last)
        for environment, key in enumerate(seam.last):
            begin, end = last.get(environment, environment * steps), (environment + 1) * steps
            if begin == end or clear[key] > 1:  # of two that look alike, nobody knows which goes on where
                continue
            length, total, known = (0, 0.0, True) if environment in last else begun[environment]
            self._open[key] = (length + end - begin, total + float(sums[end] - sums[begin]), known)

    def rewards_report(self) -> dict[str, Any] | None:
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
        """Return ``{"ended", "length", "return", "spanning", "begun_before"}``; None if none ended.

        ``spanning``, the number of episodes that went over several trajectories, is None where nothing tells.
        """
        if not self.lengths and not self.begun_before:
            return None
        return {
            "ended": len(self.lengths) + self.begun_before,
            "length": range_of(self.lengths),
            "return": range_of(self.returns),
            "spanning": self.spanning if self.followed else None,
            "begun_before": self.begun_before,
        }


@dataclass(frozen=True)
class Seam:
    """What joins a trajectory to those before and after it.

    Attributes:
        first: of each environment, the bytes of its first observation.
        last: of each environment, the bytes of the observation that its last step led to.
        whole: whether every earlier trajectory was taken: what goes on from none of them has begun here.
    """

    first: Sequence[bytes]
    last: Sequence[bytes]
    whole: bool


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


def policy_report(lows: npt.ArrayLike, highs: npt.ArrayLike, weights: Iterable[str], unknown: int) -> dict[str, Any]:
    """Return versions, ages (newest version minus a trajectory's lowest) and the number of different weights.

    Args:
        lows: lowest version of each trajectory that knows its version.
        highs: highest version of the same trajectories.
        weights: ``model_weights_id`` of all trajectories.
        unknown: number of trajectories without a version.
    """
    versions = None
    ages = None
    low, high = np.asarray(lows, np.int64), np.asarray(highs, np.int64)
    if len(low):
        newest = int(high.max())
        versions = {"min": int(low.min()), "max": newest}
        ages = range_of(newest - low)
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


# -- several parts -----------------------------------------------------------------------------------


def merge_ranges(parts: Iterable[tuple[dict[str, Any] | None, float]]) -> dict[str, Any] | None:
    """Return the range over several parts, each given with the number of its values; None if no part has any."""
    known = [(part, weight) for part, weight in parts if part is not None and weight]
    if not known:
        return None
    total = sum(weight for _, weight in known)
    return {
        "min": min(part["min"] for part, _ in known),
        "mean": sum(part["mean"] * (weight / total) for part, weight in known),
        "max": max(part["max"] for part, _ in known),
    }


def merge_rewards(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the report on the rewards of several parts together."""
    known = [part for part in parts if part is not None]
    merged = merge_ranges([(part, part["count"]) for part in known])
    if merged is None:
        return None
    count = sum(part["count"] for part in known)
    # Not by squares: those of damaged rewards, of any size, have no room in a float.
    shares = [(math.sqrt(part["count"] / count), part) for part in known]
    within = [share * part["std"] for share, part in shares]
    between = [share * (part["mean"] - merged["mean"]) for share, part in shares]
    return {**merged, "std": math.hypot(*within, *between), "count": count}


def merge_episodes(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the report on the episodes of several parts together."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    spanning = [part["spanning"] for part in known]
    counted = [(part, part["ended"] - part["begun_before"]) for part in known]
    return {
        "ended": sum(part["ended"] for part in known),
        "length": merge_ranges([(part["length"], count) for part, count in counted]),
        "return": merge_ranges([(part["return"], count) for part, count in counted]),
        "spanning": None if None in spanning else sum(spanning),
        "begun_before": sum(part["begun_before"] for part in known),
    }


def merge_agents(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the report on the rollouts of several parts together; tasks are not counted, parts may share them."""
    known = [part for part in parts if part is not None and "rollouts" in part]
    if not known:
        return None
    return {
        "rollouts": sum(part["rollouts"] for part in known),
        "tasks": None,
        "outcomes": merge_ranges([(part["outcomes"], part["rollouts"]) for part in known]),
        "turns": merge_ranges([(part["turns"], part["rollouts"]) for part in known]),
        "with_messages": sum(part["with_messages"] for part in known),
    }


def merge_policies(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the report on the policies of several parts; ages, which are each part's own, are left out."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    versions = [part["versions"] for part in known if part["versions"] is not None]
    return {
        "versions": {"min": min(v["min"] for v in versions), "max": max(v["max"] for v in versions)}
        if versions
        else None,
        "ages": None,
        "unknown": sum(part["unknown"] for part in known),
        "weights": None,
    }
