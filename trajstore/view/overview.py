"""What the page is told of all trajectories together: figures, and curves over policy versions and time. Pure."""

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
"""Spans of equal length in which curves over time are told."""

SAMPLED = 8
"""Rollouts that are read for a point of a curve."""

Sample = tuple[int, datetime | None]
"""Id of a rollout, and when it came."""

_MOST_TASKS = 200


def overview(table: DataFrame) -> Answer:
    """Return figures of the trajectories of a table of facts, curves, and tasks with the lowest mean outcome first."""
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
    """Return the points of a curve for which rollouts are to be read, and which rollouts, some for each point.

    At most 60 points, evenly chosen, and of each up to 8 rollouts, by the hashes of their ids: while others come, most
    of them stay.

    Args:
        table: facts.
        over: ``version`` or ``time``.

    Returns:
        ``{"x", "first", "last", "of"}``, with the lowest and highest id as conditions compare them and ``of`` being
        among how many points those were chosen, and the rollouts.
    """
    pl = polars()
    agents = _over(table.filter(pl.col("readable") & (pl.col("kind") == "agent") & (pl.col("response") > 0)), over)
    found = (
        agents.group_by("x")
        .agg(
            first=pl.col("trajectory_id").min(),
            last=pl.col("trajectory_id").max(),
            rollouts=pl.struct("trajectory_id", "committed").bottom_k_by(pl.col("trajectory_id").hash(0), SAMPLED),
        )
        .sort("x")
    )
    wanted = {at * (len(found) - 1) // (SPANS - 1) for at in range(SPANS)}
    chosen = found[sorted(wanted)] if len(found) else found
    told = _by_name(chosen.select("x", "first", "last"))
    samples = [sorted((one["trajectory_id"], one["committed"]) for one in some) for some in chosen["rollouts"]]
    return {**told, "of": len(found)}, samples


def _over(table: DataFrame, over: str) -> DataFrame:
    """Return a table with ``x``, that over which a curve is drawn; without what has none."""
    if over == "time":
        return _spans(table)
    pl = polars()
    return table.drop_nulls("version_high").with_columns(x=pl.col("version_high"))


def _spans(table: DataFrame) -> DataFrame:
    """Return a table with ``x``, when the span of each trajectory began, in seconds since 1970."""
    pl = polars()
    known = table.drop_nulls("committed").with_columns(x=pl.col("committed").dt.epoch("us"))
    if not len(known):
        return known
    moments = known["x"].to_numpy()
    first = int(moments.min())
    width = (int(moments.max()) - first) // SPANS + 1
    return known.with_columns(x=(first + (pl.col("x") - first) // width * width) / 1e6)


def _curves(table: DataFrame) -> Answer:
    """Return curves over ``x``: how many, means, and the lowest and highest id."""
    pl = polars()
    found = (
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
    return _by_name(found)


def _by_name(table: DataFrame) -> Answer:
    """Return columns as JSON values; ids as conditions compare them."""
    ids = ("first", "last")
    return {name: [compared_id(v) if name in ids else plain(v) for v in table[name]] for name in table.columns}


def _tasks(table: DataFrame) -> list[Answer]:
    pl = polars()
    found = (
        table.drop_nulls("task")
        .group_by("task")
        .agg(count=pl.len(), outcome=pl.col("outcome").mean(), response=pl.col("response").mean())
        .sort("outcome", "task", nulls_last=True)
        .head(_MOST_TASKS)
    )
    return [{name: plain(value) for name, value in row.items()} for row in found.iter_rows(named=True)]
