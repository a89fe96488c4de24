"""T23: questions about the facts of 100,000 and of 1,000,000 rollouts, beside DuckDB over the same facts in Parquet.

The stores are made as for T8, with 1,000 tasks, outcomes and scores that differ. Times are of a question asked again of
the same contents, as ``rows()``; the first one, which makes the table of facts, is a figure of its own without a
target. ``processor_ms`` is the processor time of all threads, which a busy machine changes little.

Then questions about what lies in rollouts: 100,000 of 1,000 tokens and seven messages, each with text of its own,
beside DuckDB over the same messages and tokens in Parquet. ``memory`` is the most memory that is no file's, of a
process that asks, above its memory with the store open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.t08_open import write_store
from tools.bench.timing import Times, in_child, in_turn, status_bytes
from tools.bench.workloads import agent_trajectory, opened
from tools.meanwhile import meanwhile
from trajstore import TrajectoryReplayBuffer
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.packing import StringTable
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

WITHIN: dict[str, tuple[str, str]] = {
    "messages by role": ("messages", "select role, count(*) from messages group by role"),
    "messages that have a text": (
        "messages",
        "select count(*) from messages where role = 'assistant' and content like '%zq%'",
    ),
    "messages of one task": ("messages", "select turn, content from messages where task = 'task-7'"),
    "mean log-prob of tokens by version": (
        "tokens",
        "select version_high, avg(old_log_probs) from tokens where loss_mask = 1 group by version_high",
    ),
}
"""By name: relation and statement."""


def figures(options: Options) -> Iterator[Figure]:
    """Yield each question's time at both sizes, and what facts take in memory."""
    needs("duckdb", "polars")
    import duckdb

    for full, target in ((100_000, 20.0), (1_000_000, 200.0)):
        total = options.count(full, 800)
        folder = options.folder / f"store_{full}"
        write_store(folder, total, 100, some_facts)
        reader = TrajectoryReplayBuffer.open(folder)
        query = reader.query()
        first = Times()
        table = first.take(query.table)
        parquet = options.folder / f"facts_{full}.parquet"
        table.write_parquet(parquet)
        connection = duckdb.connect()
        connection.execute(f"create view facts as select * from '{parquet}'")
        for name, (ask, text) in QUESTIONS.items():
            wanted = target if full == 100_000 or name == "group_by" else None
            yield _asked(f"{name}, {total:,} rollouts", partial(ask, query), connection, text, wanted, options)
        details = {"processor_ms": first.processor_ms}
        yield Figure("T23", f"first question, {total:,} rollouts", first.ms, None, "ms", details=details)
        yield from _memory(folder, total, table.estimated_size())
        connection.close()
        reader.close()
    yield from _within(options)


def _within(options: Options) -> Iterator[Figure]:
    """Yield the time of each question about messages and tokens, and the memory of one that reads all of them."""
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
    for name, (_, text) in WITHIN.items():
        ask = partial(lambda text: reader.query().sql(text).rows(), text)
        yield _asked(f"{name}, {total:,} rollouts", ask, connection, text, None, options)
    for relation in ("messages", "tokens"):
        text = next(text for one, text in WITHIN.values() if one == relation)
        memory = in_child(_most_memory, folder, text)
        yield Figure("T23", f"all {relation} of {total:,} rollouts, memory", memory / 1e6, None, "MB")
    connection.close()
    reader.close()


def _asked(
    name: str, ask: Callable[[], object], connection: Any, text: str, target: float | None, options: Options
) -> Figure:
    """Ask ours and DuckDB the same question in turn."""
    works = [ask, lambda: connection.execute(text).fetchall()]
    ours, theirs = in_turn(works, options.repeats, warmup=1)
    details = {
        "processor_ms": ours.processor_ms,
        "duckdb_ms": theirs.ms,
        "duckdb_processor_ms": theirs.processor_ms,
    }
    return Figure("T23", name, ours.ms, target, "ms", details=details)


def _most_memory(folder: Path, text: str) -> int:
    """Return the most anonymous memory that a statement takes, above that of the open store."""
    reader = TrajectoryReplayBuffer.open(folder)
    reader.query().table()
    before, seen = status_bytes("RssAnon"), [0]
    with meanwhile(lambda: seen.append(status_bytes("RssAnon")), 0.01):
        reader.query().sql(text)
    return max(max(seen) - before, 0)


def _memory(folder: Path, total: int, table: int) -> Iterator[Figure]:
    index = Catalog.open(open_directory(folder)).index
    columns = sum(index[name].nbytes for name in index.facts)
    yield Figure("T23", f"facts in the index, {total:,} rollouts", columns / total, None, "bytes a rollout")
    yield Figure("T23", f"table of the last answer, {total:,} rollouts", table / total, None, "bytes a rollout")


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
