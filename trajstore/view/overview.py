"""Figures of all trajectories, and curves over policy versions and time, for the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from trajstore._core.store.run_ids import compared_id, shown_id
from trajstore.query.engine import polars
from trajstore.view.answers import Answer, plain

if TYPE_CHECKING:
    from polars import DataFrame, Expr, Series

SPANS = 60
"""Number of equal intervals of curves over time."""

SAMPLED = 8
"""Number of rollouts read per point of a curve."""

Sample = tuple[int, datetime | None]
"""(id, commit time) of a rollout."""

_MOST_TASKS = 200

_BARS = 10
"""Maximum number of different values that have a bar each in a histogram; others are in about as many intervals."""

_MEANS = ("outcome", "success_rate", "response", "turns")
"""Facts with a curve of means."""

MEASURED = {"log_prob": "agent", "reward": "step"}
"""Kind of the trajectories that are read for a curve, by the curve's name."""


def overview(table: DataFrame) -> Answer:
    """Return figures and curves for a table of facts, and its tasks, lowest mean outcome first."""
    pl = polars()
    agents = table.filter(pl.col("kind") == "agent")
    readable = table.filter(pl.col("readable"))
    return {
        "trajectories": len(table),
        "agents": len(agents),
        "samples": int(table["samples"].sum()),
        "bytes": int(table["bytes"].sum()),
        "tasks": table["task"].n_unique() - int(bool(table["task"].null_count())),
        "outcome": plain(table["outcome"].mean()),
        "outcome_sd": plain(table["outcome"].std()),
        "outcome_n": table["outcome"].count(),
        "outcomes": [plain(table["outcome"].min()), plain(table["outcome"].max())],
        "unreadable": [shown_id(number) for number in table.filter(~pl.col("readable"))["trajectory_id"][:20]],
        "unreadable_count": len(table) - len(readable),
        "without_outcome": agents["outcome"].null_count(),
        "without_version": table["version_high"].null_count(),
        "begun": plain(table["committed"].min()),
        "ended": plain(table["committed"].max()),
        "by_version": _curves(_over(table, "version")),
        "by_time": _curves(_over(table, "time")),
        "by_task": _tasks(table),
        "histograms": {
            "outcome": _histogram(table["outcome"]),
            "response": _histogram(table["response"]),
            "turns": _histogram(table["turns"]),
            "steps": _histogram(table.filter(pl.col("kind") == "step")["steps"]),
        },
    }


def _histogram(values: Series) -> Answer | None:
    """Return counts by value or by interval, ``{"values" or "edges", "counts"}``; None if all are equal."""
    numbers = values.drop_nulls().cast(float).to_numpy()
    numbers = numbers[np.isfinite(numbers)]
    distinct, counts = np.unique(numbers, return_counts=True)
    if len(distinct) < 2:
        return None
    if len(distinct) <= _BARS:
        return {"values": distinct.tolist(), "counts": counts.tolist()}
    least, most = float(distinct[0]), float(distinct[-1])
    size = 10.0 ** math.floor(math.log10((most - least) / _BARS))
    width = next(size * times for times in (1, 2, 5, 10) if size * times * _BARS >= most - least)
    first, last = math.floor(least / width), math.floor(most / width) + 1
    edges = [float(f"{at * width:.12g}") for at in range(first, last + 1)]
    places = np.searchsorted(edges, numbers, side="right") - 1  # as the conditions of the bars have it
    return {"edges": edges, "counts": np.bincount(places, minlength=len(edges) - 1).tolist()}


def spread_of(means: Sequence[float], mean: float) -> Mapping[str, float | int | None]:
    """Return ``{"n", "sd", "low", "high"}`` of some values, as the curves of facts have it."""
    if not means:
        return {"n": 0, "sd": None, "low": None, "high": None}
    squares = [(value - mean) * (value - mean) for value in means]
    deviation = math.sqrt(sum(squares) / (len(means) - 1)) if len(means) > 1 else None
    low, high = (mean, mean) if deviation is None else (mean - deviation, mean + deviation)
    return {"n": len(means), "sd": deviation, "low": max(low, min(means)), "high": min(high, max(means))}


def sampled(table: DataFrame, over: str, name: str) -> tuple[Answer, list[list[Sample]]]:
    """Choose the points of a curve, and the trajectories to read for each.

    Chooses at most 60 evenly spaced points, and up to 8 trajectories for each by the hashes of their ids, so that most
    choices stay when trajectories are added.

    Args:
        table: facts.
        over: ``version`` or ``time``.
        name: name of the curve, one of :data:`MEASURED`.

    Returns:
        ``{"x", "first", "last", "of"}`` and the trajectories. ``first`` and ``last`` are the lowest and highest id as
        used in conditions; ``of`` is the number of points before the choice.
    """
    pl = polars()
    is_read = pl.col("readable") & (pl.col("kind") == MEASURED[name])
    read = _over(table.filter(is_read & pl.col("response").is_not_null() if name == "log_prob" else is_read), over)
    curve = (
        read.group_by("x")
        .agg(
            first=pl.col("trajectory_id").min(),
            last=pl.col("trajectory_id").max(),
            rollouts=pl.struct("trajectory_id", "committed").bottom_k_by(pl.col("trajectory_id").hash(0), SAMPLED),
        )
        .sort("x")
    )
    wanted = {at * (len(curve) - 1) // (SPANS - 1) for at in range(SPANS)}
    chosen = curve[sorted(wanted)] if len(curve) else curve
    points = _by_name(chosen.select("x", "first", "last"))
    samples = [
        sorted((rollout["trajectory_id"], rollout["committed"]) for rollout in rollouts)
        for rollouts in chosen["rollouts"]
    ]
    return {**points, "of": len(curve)}, samples


def _over(table: DataFrame, over: str) -> DataFrame:
    """Add ``x``, the quantity on the horizontal axis; drop trajectories without it."""
    if over == "time":
        return _spans(table)
    pl = polars()
    return table.drop_nulls("version_high").with_columns(x=pl.col("version_high"))


def _spans(table: DataFrame) -> DataFrame:
    """Add ``x``, the start of each trajectory's interval in seconds since 1970."""
    pl = polars()
    known = table.drop_nulls("committed").with_columns(x=pl.col("committed").dt.epoch("us"))
    if not len(known):
        return known
    moments = known["x"].to_numpy()
    first = int(moments.min())
    width = (int(moments.max()) - first) // SPANS + 1
    return known.with_columns(x=(first + (pl.col("x") - first) // width * width) / 1e6)


def _curves(table: DataFrame) -> Answer:
    """Return curves over ``x``: counts, means with their spread, and the lowest and highest id.

    The spread of ``NAME`` is ``NAME_n``, ``NAME_sd`` (standard deviation of a sample), ``NAME_low`` and ``NAME_high``:
    the mean minus and plus the deviation, cut at the lowest and highest value.
    """
    pl = polars()
    curves = (
        table.group_by("x")
        .agg(
            count=pl.len(),
            samples=pl.col("samples").sum(),
            **{key: values for name in _MEANS for key, values in _spread(name).items()},
            first=pl.col("trajectory_id").min(),
            last=pl.col("trajectory_id").max(),
        )
        .sort("x")
    )
    return _by_name(curves)


def _spread(name: str) -> dict[str, Expr]:
    """Return the mean and the spread of a fact, by name."""
    pl = polars()
    values = pl.col(name)
    mean, deviation = values.mean(), values.std().fill_null(0)
    return {
        name: mean,
        f"{name}_n": values.count(),
        f"{name}_sd": values.std(),
        f"{name}_low": pl.max_horizontal(mean - deviation, values.min()),
        f"{name}_high": pl.min_horizontal(mean + deviation, values.max()),
    }


def _by_name(table: DataFrame) -> Answer:
    """Return columns as JSON values, with ids as used in conditions."""
    ids = ("first", "last")
    return {name: [compared_id(v) if name in ids else plain(v) for v in table[name]] for name in table.columns}


def _tasks(table: DataFrame) -> list[Answer]:
    pl = polars()
    tasks = (
        table.drop_nulls("task")
        .group_by("task")
        .agg(count=pl.len(), outcome=pl.col("outcome").mean(), response=pl.col("response").mean())
        .sort("outcome", "task", nulls_last=True)
        .head(_MOST_TASKS)
    )
    return [{name: plain(value) for name, value in row.items()} for row in tasks.iter_rows(named=True)]
