"""Statistics on trajectories. Pure; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    """

    values: dict[str, npt.NDArray[Any]]
    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, set[str]] = field(default_factory=dict)


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
