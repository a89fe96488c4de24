"""Statistics on trajectories: ranges, rewards, episodes. Pure; no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.fields import Axis, axis_of, skip_extra_rows

Range = dict[str, float]

_SHOWN_GAPS = 20


def range_of(values: npt.ArrayLike) -> Range | None:
    """Return ``{"min", "mean", "max"}`` of the finite values; None if there are none."""
    array = np.asarray(values)
    array = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    if not array.size:
        return None
    return {"min": array.min().item(), "mean": float(array.mean(dtype=np.float64)), "max": array.max().item()}


def ids_report(ids: npt.NDArray[np.int64], **more: int) -> dict[str, Any] | None:
    """Return ``{"first", "last", "absent", "gaps"}`` of ids, plus ``more``; lists only the first gaps."""
    if not len(ids):
        return None
    ordered = np.sort(ids)
    gaps = [[int(ordered[i]) + 1, int(ordered[i + 1]) - 1] for i in np.flatnonzero(np.diff(ordered) > 1)]
    absent = sum(last - first + 1 for first, last in gaps)
    return {"first": int(ordered[0]), "last": int(ordered[-1]), "absent": absent, "gaps": gaps[:_SHOWN_GAPS], **more}


def columns_report(totals: Mapping[tuple[str, str, tuple[int, ...]], int]) -> list[dict[str, Any]]:
    """Return the report on columns from their bytes by (name, dtype, shape of a row)."""
    return [
        {"name": name, "dtype": dtype, "row_shape": list(shape), "bytes": nbytes}
        for (name, dtype, shape), nbytes in totals.items()
    ]


@dataclass
class RewardStatistics:
    """Rewards and episodes, accumulated trajectory by trajectory.

    An episode is counted where it ends. Observations show whether it began in an earlier trajectory: an environment
    continues an episode if its first observation equals the one after the last step of another trajectory. Without
    observations, an episode counts from the start of the trajectory in which it ends.

    If no earlier trajectory matches the first observation, the episode began there, or in a trajectory that was evicted
    or not read. The largest id distance between matching trajectories bounds how far back the episode can reach: if all
    ids within this distance were read, it began there; otherwise its beginning is unknown.
    """

    whole: bool = True
    """Whether every present trajectory is read. If no trajectory continues in another, this decides whether episodes
    at the start of one began there."""
    rewards: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    """Number, sum, sum of squares, minimum and maximum of the single rewards of each trajectory."""
    followed: bool = True
    """Whether all trajectories had observations to match episodes by."""
    _open: dict[bytes, _Begun] = field(default_factory=dict)
    _reach: int = 0
    """Largest id distance between a trajectory and its continuation."""
    _read: list[int] = field(default_factory=list)
    _ended: list[_Begun] = field(default_factory=list)

    def add(
        self,
        rewards: torch.Tensor,
        dones: torch.Tensor | None,
        seam: Seam | None = None,
        broken: npt.NDArray[np.bool_] | None = None,
        valid: torch.Tensor | None = None,
    ) -> None:
        """Add a trajectory.

        Args:
            rewards: ``[T, B, C]``.
            dones: ``[T or T + E, B, C]``.
            seam: keys that join it to others.
            broken: mask ``[T, B]`` of steps that do not continue the episode of the step before; the steps before
                belong to no ended episode.
            valid: bool ``[T, B]``; steps that are not are not counted. None: all are.
        """
        per_step = rewards.to(torch.float64).numpy()
        steps, batch = per_step.shape[:2]
        counts = np.ones((steps, batch), np.bool_) if valid is None else valid.numpy().reshape(steps, batch)
        if (counted := per_step[counts]).size:
            total, squares = float(counted.sum()), float(np.square(counted).sum())
            self.rewards.append((counted.size, total, squares, float(counted.min()), float(counted.max())))
        if dones is None or not steps or not batch:
            return
        ended = sampled_rows(dones.bool(), steps, "dones").numpy().reshape(steps, batch, -1).any(axis=-1) & counts
        broken = np.zeros((steps, batch), np.bool_) if broken is None else broken
        by_step = np.where(counts, per_step.reshape(steps, batch, -1).sum(axis=-1), 0.0)
        number, begun = -1, [_Begun(None, -1)] * batch
        self.followed = self.followed and seam is not None
        if seam is not None:
            number = seam.number
            self._read.append(number)
            begun = [self._open.pop(key, _Begun(number, number)) for key in seam.first]
            self._reach = max([self._reach, *(number - episode.newest for episode in begun)])
        sums, done = (np.concatenate([np.zeros((1, batch)), np.cumsum(each, axis=0)]) for each in (by_step, counts))
        keys = Counter(() if seam is None else seam.last)
        for at, episode in enumerate(begun):
            start = 0
            for step in np.flatnonzero(ended[:, at] | broken[:, at]).tolist():
                if broken[step, at]:
                    episode, start = _Begun(None, number), step
                if ended[step, at]:
                    ended_there = episode.with_steps(number, done[[start, step + 1], at], sums[[start, step + 1], at])
                    self._ended.append(ended_there)
                    episode, start = _Begun(None, number), step + 1
            if seam is not None and start < steps and keys[seam.last[at]] == 1:  # ambiguous if two look alike
                self._open[seam.last[at]] = episode.with_steps(number, done[[start, -1], at], sums[[start, -1], at])

    def ended(self) -> tuple[list[_Begun], int]:
        """Return the ended episodes with a known beginning, and the number of the others.

        One without a matching earlier trajectory may have begun before the trajectory where it was first seen.
        """
        starts = np.array([-1 if episode.start is None else episode.start for episode in self._ended], np.int64)
        if self._reach:
            read = np.unique(np.array(self._read, np.int64))
            lows = np.maximum(starts - self._reach, 0)
            there = np.searchsorted(read, starts) - np.searchsorted(read, lows) == starts - lows
        else:
            there = np.full(len(starts), self.whole)
        known = [episode for episode, is_known in zip(self._ended, (starts < 0) | there, strict=True) if is_known]
        return known, len(self._ended) - len(known)


def rewards_report(parts: Sequence[RewardStatistics]) -> dict[str, Any] | None:
    """Return ``{"min", "mean", "max", "std", "count"}`` of the single rewards of stores; None without rewards."""
    if not (rewards := [row for part in parts for row in part.rewards]):
        return None
    counts, totals, squares, lows, highs = zip(*rewards, strict=True)
    count, mean = sum(counts), sum(totals) / sum(counts)
    deviation = math.sqrt(max(0.0, sum(squares) / count - mean * mean))
    return {"min": min(lows), "mean": mean, "max": max(highs), "std": deviation, "count": count}


def episodes_report(parts: Sequence[RewardStatistics]) -> dict[str, Any] | None:
    """Return ``{"ended", "length", "return", "spanning", "begun_before"}``; None if no episode ended.

    ``spanning``, the number of episodes over several trajectories, is None without observations.
    ``begun_before`` ended episodes may have begun in trajectories that were evicted, rolled back or not read; ranges of
    lengths and returns, and ``spanning``, exclude them.
    """
    ended = [part.ended() for part in parts]
    episodes, begun_before = [one for known, _ in ended for one in known], sum(others for _, others in ended)
    if not episodes and not begun_before:
        return None
    return {
        "ended": len(episodes) + begun_before,
        "length": range_of([episode.steps for episode in episodes]),
        "return": range_of([episode.total for episode in episodes]),
        "spanning": sum(one.spans for one in episodes) if all(part.followed for part in parts) else None,
        "begun_before": begun_before,
    }


@dataclass(frozen=True, slots=True)
class _Begun:
    """An episode so far.

    Attributes:
        start: id of the trajectory at whose start it was first seen; None if it is known to have begun in one.
        newest: id of the last trajectory with a part of it.
        steps: number of steps seen.
        total: sum of the rewards seen.
        spans: whether it had steps before its newest trajectory.
    """

    start: int | None
    newest: int
    steps: int = 0
    total: float = 0.0
    spans: bool = False

    def with_steps(self, number: int, counts: npt.NDArray[np.float64], sums: npt.NDArray[np.float64]) -> _Begun:
        """Return it with the steps of a trajectory between two moments, whose counts and sums these are."""
        steps, total = self.steps + int(counts[1] - counts[0]), self.total + float(sums[1] - sums[0])
        return _Begun(self.start, number, steps, total, self.steps > 0)


@dataclass(frozen=True)
class Seam:
    """The keys that join a trajectory to its neighbours.

    Attributes:
        first: per environment, the bytes of its first observation.
        last: per environment, the bytes of the observation after its last step.
        number: id of the trajectory.
    """

    first: Sequence[bytes]
    last: Sequence[bytes]
    number: int


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


@dataclass(slots=True)
class Facts:
    """The known facts of a store's trajectories, from which the figures of a report follow.

    Attributes:
        values: by name, the known values of ``steps``, ``batch``, ``tokens``, ``response_tokens``,
            ``max_episode_length``, ``outcome``, ``turns``, ``messages``, ``version_low`` and ``version_high``.
        counts: numbers of ``rollouts``, of those ``without_task``, and of trajectories ``without_version``.
        names: names of the ``tasks``, ids of the ``sessions`` of agents and of the ``weights``.
        rewards: rewards and episodes of the blocks that were read.
    """

    values: dict[str, npt.NDArray[Any]]
    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, set[str]] = field(default_factory=dict)
    rewards: RewardStatistics = field(default_factory=RewardStatistics)


def figures(parts: Sequence[Facts]) -> dict[str, Any]:
    """Return the figures of one or several stores together; None where nothing is known.

    ``policy.ages`` are the newest version minus each trajectory's lowest.
    """

    def known(name: str) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, np.int64), *(part.values[name] for part in parts if name in part.values)])

    counts, outcomes = sum((part.counts for part in parts), Counter[str]()), known("outcome")
    tasks, sessions, weights = (
        set[str]().union(*(part.names.get(name, ()) for part in parts)) for name in ("tasks", "sessions", "weights")
    )
    lows, highs = known("version_low"), known("version_high")
    rewards = [part.rewards for part in parts]
    ranges = ("steps", "batch", "tokens", "response_tokens", "max_episode_length")
    agents = {
        "rollouts": counts["rollouts"],
        "tasks": len(tasks),
        "without_task": counts["without_task"],
        "sessions": len(sessions),
        "outcomes": range_of(outcomes),
        "without_outcome": counts["rollouts"] - int(np.isfinite(outcomes).sum()),
        "turns": range_of(known("turns")),
        "with_messages": len(known("messages")),
    }
    return {
        **{name: range_of(known(name)) for name in ranges},
        "response_tokens_known": len(known("response_tokens")),
        "rewards": rewards_report(rewards),
        "episodes": episodes_report(rewards),
        "agents": agents if counts["rollouts"] else None,
        "policy": {
            "versions": {"min": int(lows.min()), "max": int(highs.max())} if len(lows) else None,
            "ages": range_of(highs.max() - lows) if len(lows) else None,
            "unknown": counts["without_version"],
            "weights": len(weights - {""}),
        },
    }


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
