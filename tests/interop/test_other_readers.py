"""What converters write, read by other means than theirs, ``json`` and pyarrow, and by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interop.test_formats import ROLLOUTS, leaves, read_all
from tests.stores import stored
from tests.support.equality import same
from trajstore import AgentTrajectory
from trajstore.interop.convert import convert_from, convert_to

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")

Rows = list[dict[str, Any]]
Values = dict[str, Any]

TEXTS = ("task_id", "data_id", "rollout_id", "query")


def lines_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def rows_of(path: Path) -> Rows:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")
    return [row for file in sorted(path.iterdir()) for row in parquet.read_table(file).to_pylist()]


def whole(messages: Rows) -> list[Any]:
    return [json.loads(message["json"]) for message in messages]


def _chat(row: Values) -> Values:
    values = {name: row.get(name, "") for name in TEXTS}
    metadata = row.get("metadata", {}) | ({"tools": row["tools"]} if "tools" in row else {})
    return {"messages": row["messages"], "outcome": row.get("reward"), "metadata": metadata, **values}


def _jsonl(row: Values) -> Values:
    outcome = row["reward"] and row["reward"]["outcome"]
    return {name: row[name] for name in ("messages", "metadata", *TEXTS)} | {"outcome": outcome}


def _parquet(row: Values) -> Values:
    values = {name: row[name] for name in ("outcome", *TEXTS)}
    return {"messages": whole(row["messages"]), "metadata": json.loads(row["rest"])["metadata"], **values}


def _trl(row: Values) -> Values:
    tools = {} if row["tools"] is None else {"tools": json.loads(row["tools"])}
    values = {name: row[name] for name in TEXTS} | {"outcome": row["reward"]}
    messages = whole(row["prompt"] + row["completion"])
    return {"messages": messages, "metadata": json.loads(row["metadata"] or "{}") | tools, **values}


def _verl(row: Values) -> Values:
    extra = row["extra_info"]
    prompt, messages = whole(row["prompt"]), whole(row["messages"])
    assert messages[: len(prompt)] == prompt
    assert [message["role"] for message in row["messages"]] == [message["role"] for message in messages]
    task = row["data_source"] if extra["index"] is None else f"{row['data_source']}:{extra['index']}"
    values = {name: extra[name] for name in TEXTS[1:]} | {"task_id": task, "outcome": row["reward"]}
    return {"messages": messages, "metadata": json.loads(extra["metadata"]), **values}


READERS: dict[str, tuple[Callable[[Path], Rows], Callable[[Values], Values]]] = {
    "jsonl": (lines_of, _jsonl),
    "chat": (lines_of, _chat),
    "parquet": (rows_of, _parquet),
    "trl": (rows_of, _trl),
    "verl": (rows_of, _verl),
}


def expected_of(rollout: AgentTrajectory) -> Values:
    outcome = None if rollout.reward is None else rollout.reward.outcome
    values = {name: getattr(rollout, name) for name in ("messages", "metadata", *TEXTS)}
    return {**values, "outcome": outcome}


def exact(value: Any) -> str:
    """Return a text that differs where 1, 1.0 and True, or 0.0 and -0.0, differ."""
    return json.dumps(value, sort_keys=True)


def compare(name: str, rollouts: list[AgentTrajectory], folder: Path) -> None:
    convert_to(stored(folder / "store", rollouts), folder / "out", name)
    read, values_of = READERS[name]
    rows = read(folder / "out")
    for row, rollout in zip(rows, rollouts, strict=True):
        assert exact(values_of(row)) == exact(expected_of(rollout))
    convert_from(folder / "out", folder / "back", name)
    for first, second in zip(read_all(folder / "store"), read_all(folder / "back"), strict=True):
        assert same(dict(leaves(first)), dict(leaves(second)))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("sets", [3, pytest.param(200, marks=pytest.mark.campaign)])
def test_other_readers_see_what_was_stored(name: str, sets: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=sets, deadline=None)
    @given(rollouts=st.lists(ROLLOUTS, min_size=1, max_size=8))
    def check(rollouts: list[AgentTrajectory]) -> None:
        compare(name, rollouts, tmp_path_factory.mktemp(name))

    check()
