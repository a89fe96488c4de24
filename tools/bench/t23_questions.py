"""T23: questions about the facts of 100,000 and of 1,000,000 rollouts, beside DuckDB over the same facts in Parquet.

The stores are made as for T8, with 1,000 tasks, outcomes and scores that differ. Times are of a question asked again of
the same contents, as ``rows()``. ``processor_ms`` is the processor time of all threads, which a busy machine changes
little.

Then questions about what lies in rollouts: 100,000 of 1,000 tokens and seven messages, each with text of its own,
beside DuckDB over the same messages and tokens in Parquet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.t08_open import write_store
from tools.bench.timing import in_turn
from tools.bench.workloads import agent_trajectory, opened
from trajstore import TrajectoryReplayBuffer
from trajstore._core.store.json_arrays import StringTable
from trajstore.query import Query

_TASKS = 1000

QUESTIONS: dict[str, tuple[Callable[[Query], object], str]] = {
    "where": (
        lambda query: query.where("task = 'task-7' and outcome > 0").rows(),
        "select * from facts where task = 'task-7' and outcome > 0",
    ),
    "group_by": (
        lambda query: query.group_by("task").select("avg(outcome) as mean", "count(*) as n").order_by("mean").rows(),
        "select task, avg(outcome) as mean, count(*) as n from facts group by task order by mean",
    ),
    "order_by": (
        lambda query: query.order_by("reward_judge desc").limit(10).rows(),
        "select * from facts order by reward_judge desc limit 10",
    ),
    "sql": (
        lambda query: query.sql("select version_high, avg(outcome) from trajectories group by version_high").rows(),
        "select version_high, avg(outcome) from facts group by version_high",
    ),
}
"""By name: the question, and the same for DuckDB."""

WITHIN = {
    "messages by role": "select role, count(*) from messages group by role",
    "mean log-prob of tokens by version": (
        "select version_high, avg(old_log_probs) from tokens where loss_mask = 1 group by version_high"
    ),
}
"""By name: the statement, for both."""


def figures(options: Options) -> Iterator[Figure]:
    """Yield each question's time at both sizes."""
    needs("duckdb", "polars")
    import duckdb

    for full, target in ((100_000, 20.0), (1_000_000, 200.0)):
        total = options.count(full, 800)
        folder = options.folder / f"store_{full}"
        write_store(folder, total, 100, some_facts)
        reader = TrajectoryReplayBuffer.open(folder)
        query = reader.query()
        parquet = options.folder / f"facts_{full}.parquet"
        query.table().write_parquet(parquet)
        connection = duckdb.connect()
        connection.execute(f"create view facts as select * from '{parquet}'")
        for name, (ask, text) in QUESTIONS.items():
            wanted = target if full == 100_000 or name == "group_by" else None
            yield _asked(f"{name}, {total:,} rollouts", partial(ask, query), connection, text, wanted, options)
        connection.close()
        reader.close()
    yield from _within(options)


def _within(options: Options) -> Iterator[Figure]:
    """Yield the time of each question about messages and tokens."""
    import duckdb

    total = options.count(100_000, 800)
    folder = options.folder / "rollouts"
    random = torch.Generator().manual_seed(3)
    with opened(folder) as writer:
        for first in range(0, total, 100):
            writer.add_trajectories([agent_trajectory(random, at) for at in range(first, min(first + 100, total))])
    reader = TrajectoryReplayBuffer.open(folder)
    connection = duckdb.connect()
    for relation, own in {"messages": "turn, role, content", "tokens": "loss_mask, old_log_probs"}.items():
        parquet = options.folder / f"{relation}.parquet"
        stream = reader.query().stream(f"select trajectory_id, task, version_high, {own} from {relation}")
        connection.register("stream", stream)
        connection.execute(f"copy (select * from stream) to '{parquet}'")
        connection.execute(f"create view {relation} as select * from '{parquet}'")
        connection.unregister("stream")
    for name, text in WITHIN.items():
        ask = partial(lambda text: reader.query().sql(text).rows(), text)
        yield _asked(f"{name}, {total:,} rollouts", ask, connection, text, None, options)
    connection.close()
    reader.close()


def _asked(
    name: str, ask: Callable[[], object], connection: Any, text: str, target: float | None, options: Options
) -> Figure:
    """Ask ours and DuckDB the same question in turn."""
    works = [ask, lambda: connection.execute(text).fetchall()]
    ours, theirs = in_turn(works, options.repeats, warmup=1)
    details = {"processor_ms": ours.processor_ms, "duckdb_ms": theirs.ms, "duckdb_processor_ms": theirs.processor_ms}
    return Figure("T23", name, ours.ms, target, "ms", details=details)


def some_facts(total: int, texts: StringTable) -> dict[str, npt.NDArray[Any]]:
    """Return facts of rollouts of 1,000 tasks, with outcomes, a score and turns that differ."""
    random = np.random.default_rng(1)
    tasks = np.array([texts.add(f"task-{number}") for number in range(_TASKS)], np.int32)
    versions = np.arange(total, dtype=np.int64) // 512
    return {
        "task": tasks[random.integers(0, _TASKS, total)],
        "outcome": random.integers(0, 2, total).astype(np.float64),
        "reward_judge": random.random(total),
        "turns": random.integers(1, 20, total).astype(np.int32),
        "version_low": versions,
        "version_high": versions,
    }
