"""Figures of all trajectories, and curves over policy versions and time, for the page. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from trajstore.core.store.run_ids import compared_id, shown_id
from trajstore.query.engine import polars
from trajstore.view.answers import plain

if TYPE_CHECKING:
    from polars import DataFrame

Answer = dict[str, Any]

SPANS = 60
"""Number of equal intervals of curves over time."""

SAMPLED = 8
"""Number of rollouts read per point of a curve."""

Sample = tuple[int, datetime | None]
"""(id, commit time) of a rollout."""

_MOST_TASKS = 200


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
    }


def sampled(table: DataFrame, over: str) -> tuple[Answer, list[list[Sample]]]:
    """Choose the points of a curve, and the rollouts to read for each.

    Chooses at most 60 evenly spaced points, and up to 8 rollouts for each by the hashes of their ids, so that most
    choices stay when rollouts are added.

    Args:
        table: facts.
        over: ``version`` or ``time``.

    Returns:
        ``{"x", "first", "last", "of"}`` and the rollouts. ``first`` and ``last`` are the lowest and highest id as used
        in conditions; ``of`` is the number of points before the choice.
    """
    pl = polars()
    agents = _over(table.filter(pl.col("readable") & (pl.col("kind") == "agent") & (pl.col("response") > 0)), over)
    curve = (
        agents.group_by("x")
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
    """Return curves over ``x``: counts, means, and the lowest and highest id."""
    pl = polars()
    curves = (
        table.group_by("x")
        .agg(
            count=pl.len(),
            outcome=pl.col("outcome").mean(),
            success_rate=pl.col("success_rate").mean(),
            response=pl.col("response").filter(pl.col("kind") == "agent").mean(),
            turns=pl.col("turns").mean(),
            samples=pl.col("samples").sum(),
            first=pl.col("trajectory_id").min(),
            last=pl.col("trajectory_id").max(),
        )
        .sort("x")
    )
    return _by_name(curves)


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
