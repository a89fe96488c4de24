"""Figures of all trajectories, and curves over policy versions and time, for the page. Pure."""

from __future__ import annotations

from typing import Any

from trajstore._core.store.run_ids import compared_id
from trajstore.query.engine import pl
from trajstore.view.answers import Answer, plain

SPANS = 60
"""Number of equal intervals of curves over time."""

_MOST_TASKS = 200

_RATES = ("outcome", "success_rate")
"""Facts that may be proportions: if all values are 0 or 1."""

_MEANS = (*_RATES, "response", "turns")
"""Facts with a curve of means."""

_Z = 1.959964
"""Standard errors from the middle of a 95 % interval to its ends, of a normal distribution."""


def overview(table: pl.DataFrame) -> Answer:
    """Return figures and curves for a table of facts, and its tasks, lowest mean outcome first."""
    agents = table.filter(pl.col("kind") == "agent")
    known = table.drop_nulls("outcome")
    low, high = interval(known["outcome"].mean(), len(known), _error(known["outcome"]), _is_binary(known["outcome"]))
    return {
        "trajectories": len(table),
        "agents": len(agents),
        "samples": int(table["samples"].sum()),
        "bytes": int(table["bytes"].sum()),
        "tasks": table["task"].n_unique() - int(bool(table["task"].null_count())),
        "outcome": plain(known["outcome"].mean()),
        "outcome_low": plain(low),
        "outcome_high": plain(high),
        "outcome_n": len(known),
        "unreadable_count": len(table) - int(table["readable"].sum()),
        "without_outcome": agents["outcome"].null_count(),
        "without_version": table["version_high"].null_count(),
        "begun": plain(table["committed"].min()),
        "ended": plain(table["committed"].max()),
        "by_version": _curves(_over(table, "version")),
        "by_time": _curves(_over(table, "time")),
        "by_task": _tasks(table),
    }


def interval(mean: Any, count: Any, error: Any, is_binary: bool) -> tuple[Any, Any]:
    """Return the ends of a 95 % interval of a mean of independent values; None where it is unknown.

    Of values that are 0 or 1 it is that of a proportion, see E. B. Wilson, "Probable inference, the law of succession,
    and statistical inference", Journal of the American Statistical Association 22 (1927). Of others it is the mean
    ± 1.96 standard errors.

    Args:
        mean: the mean, a number or an expression of Polars, like the next two.
        count: number of values.
        error: standard error of the mean; None if it is unknown.
        is_binary: whether all values are 0 or 1.
    """
    if mean is None or (not is_binary and error is None):
        return None, None
    if not is_binary:
        return mean - _Z * error, mean + _Z * error
    square = _Z * _Z / count
    middle = (mean + square / 2) / (1 + square)
    half = (mean * (1 - mean) * square + square * square / 4) ** 0.5 / (1 + square)
    return middle - half, middle + half


def _is_binary(values: pl.Series) -> bool:
    return bool(values.is_in([0.0, 1.0]).all())


def _error(values: Any) -> Any:
    """Return the standard error of a mean; None of fewer than two values."""
    deviation = values.std()
    return None if deviation is None else deviation / values.count() ** 0.5


def _over(table: pl.DataFrame, over: str) -> pl.DataFrame:
    """Add ``x``, the quantity on the horizontal axis; drop trajectories without it."""
    if over == "time":
        return _spans(table)
    return table.drop_nulls("version_high").with_columns(x=pl.col("version_high"))


def _spans(table: pl.DataFrame) -> pl.DataFrame:
    """Add ``x``, the start of each trajectory's interval in seconds since 1970."""
    known = table.drop_nulls("committed").with_columns(x=pl.col("committed").dt.epoch("us"))
    if not len(known):
        return known
    moments = known["x"].to_numpy()
    first = int(moments.min())
    width = (int(moments.max()) - first) // SPANS + 1
    return known.with_columns(x=(first + (pl.col("x") - first) // width * width) / 1e6)


def _curves(table: pl.DataFrame) -> Answer:
    """Return curves over ``x``: counts, means with their interval, and the lowest and highest id.

    ``NAME_n`` is the number of values, ``NAME_low`` and ``NAME_high`` the ends of the mean's interval.
    """
    curves = (
        table.group_by("x")
        .agg(
            count=pl.len(),
            **{key: values for name in _MEANS for key, values in _mean(table, name).items()},
            first=pl.col("trajectory_id").min(),
            last=pl.col("trajectory_id").max(),
        )
        .sort("x")
    )
    return _by_name(curves)


def _mean(table: pl.DataFrame, name: str) -> dict[str, pl.Expr]:
    """Return the mean of a fact, the number of values, and the mean's interval, by name."""
    values, is_binary = pl.col(name), name in _RATES and _is_binary(table[name])
    low, high = interval(values.mean(), values.count(), _error(values), is_binary)
    return {name: values.mean(), f"{name}_n": values.count(), f"{name}_low": low, f"{name}_high": high}


def _by_name(table: pl.DataFrame) -> Answer:
    """Return columns as JSON values, with ids as used in conditions."""
    ids = ("first", "last")
    return {name: [compared_id(v) if name in ids else plain(v) for v in table[name]] for name in table.columns}


def _tasks(table: pl.DataFrame) -> list[Answer]:
    tasks = (
        table.drop_nulls("task")
        .group_by("task")
        .agg(count=pl.len(), outcome=pl.col("outcome").mean())
        .sort("outcome", "task", nulls_last=True)
        .head(_MOST_TASKS)
    )
    return [{name: plain(value) for name, value in row.items()} for row in tasks.iter_rows(named=True)]
