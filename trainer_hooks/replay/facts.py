"""Facts about a pool's trajectories, for queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from trainer_hooks.replay.state import PoolState

if TYPE_CHECKING:
    from polars import DataFrame

POOL_FACTS: Mapping[str, str] = {
    "difficulty": "successes of the task in its newest step; null where it is in no bucket",
    "pool_entropy": "mean entropy of the history when it entered, in nats; null of a demonstration",
    "uses": "how often the history was drawn",
    "demonstration": "whether it is a demonstration, which has no log-probs",
}
"""Names and meanings of the facts."""


def with_pool_facts(facts: DataFrame, state: PoolState, *, every: bool = False) -> DataFrame:
    """Return the facts of the trajectories in a pool, with :data:`POOL_FACTS`.

    Args:
        facts: of all trajectories in the pool's store.
        state: of the pool.
        every: keep trajectories outside the pool, whose facts of it are null.
    """
    from trajstore.query.engine import polars  # a pool in memory does not need polars

    pl = polars()
    entries = list(state.all_entries())
    known = pl.DataFrame(
        {
            "trajectory_id": [entry.trajectory_id for entry in entries],
            "difficulty": [state.buckets.difficulty(entry.task_id) for entry in entries],
            "pool_entropy": [entry.entropy for entry in entries],
            "uses": state.uses_of(entries),
            "demonstration": [entry.is_demonstration for entry in entries],
        },
        schema={
            **dict.fromkeys(("trajectory_id", "difficulty"), pl.Int64),
            "pool_entropy": pl.Float64,
            "uses": pl.Int64,
            "demonstration": pl.Boolean,
        },
    )
    others = facts.drop(known.columns[1:], strict=False)
    how: Literal["left", "inner"] = "left" if every else "inner"
    joined: DataFrame = others.join(known, on="trajectory_id", how=how, maintain_order="left")
    return joined
