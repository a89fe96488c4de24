"""Figures of all trajectories, and curves over policy versions and time, for the page. Pure."""

from __future__ import annotations

from trajstore._core.store.run_ids import compared_id
from trajstore.query.engine import pl
from trajstore.view.answers import Answer, plain, plain_dict

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
    return {
        "trajectories": len(table),
        "agents": len(agents),
        "samples": int(table["samples"].sum()),
        "bytes": int(table["bytes"].sum()),
        "tasks": table["task"].n_unique() - int(bool(table["task"].null_count())),
        **plain_dict(table.select(**_mean(table, "outcome")).row(0, named=True)),
        "unreadable_count": len(table) - int(table["readable"].sum()),
        "without_outcome": agents["outcome"].null_count(),
        "without_version": table["version_high"].null_count(),
        "begun": plain(table["committed"].min()),
        "ended": plain(table["committed"].max()),
        "by_version": _curves(table.drop_nulls("version_high").with_columns(x="version_high")),
        "by_time": _curves(_spans(table)),
        "by_task": _tasks(table),
    }


def _mean(table: pl.DataFrame, name: str) -> dict[str, pl.Expr]:
    """Return the mean of a fact, the number of values, and the mean's 95 % interval if they are independent, by name.

    ``NAME_n`` is the number of values, ``NAME_low`` and ``NAME_high`` the ends of the interval, null where it is
    unknown. Of values that are 0 or 1 it is that of a proportion, see E. B. Wilson, "Probable inference, the law of
    succession, and statistical inference", Journal of the American Statistical Association 22 (1927). Of others it is
    the mean ± 1.96 standard errors.
    """
    values = pl.col(name)
    mean, count = values.mean(), values.count()
    if name in _RATES and table[name].is_in([0.0, 1.0]).all():
        square = _Z * _Z / count
        middle = (mean + square / 2) / (1 + square)
        half = (mean * (1 - mean) * square + square * square / 4) ** 0.5 / (1 + square)
    else:
        middle, half = mean, _Z * values.std() / count**0.5
    return {name: mean, f"{name}_n": count, f"{name}_low": middle - half, f"{name}_high": middle + half}


def _spans(table: pl.DataFrame) -> pl.DataFrame:
    """Add ``x``, the start of each trajectory's interval in seconds since 1970; drop those without a time."""
    known = table.drop_nulls("committed").with_columns(x=pl.col("committed").dt.epoch("us"))
    if not len(known):
        return known
    moments = known["x"].to_numpy()
    first = int(moments.min())
    width = (int(moments.max()) - first) // SPANS + 1
    return known.with_columns(x=(first + (pl.col("x") - first) // width * width) / 1e6)


def _curves(table: pl.DataFrame) -> Answer:
    """Return curves over ``x``: counts, means as of :func:`_mean`, and the lowest and highest id for conditions."""
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
    ids = ("first", "last")
    return {name: [compared_id(v) if name in ids else plain(v) for v in curves[name]] for name in curves.columns}


def _tasks(table: pl.DataFrame) -> list[Answer]:
    tasks = (
        table.drop_nulls("task")
        .group_by("task")
        .agg(count=pl.len(), outcome=pl.col("outcome").mean())
        .sort("outcome", "task", nulls_last=True)
        .head(_MOST_TASKS)
    )
    return [{name: plain(value) for name, value in row.items()} for row in tasks.iter_rows(named=True)]
