"""Queries about messages, tokens and steps, against plain loops over the added data."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import programs
from tests.forging import spoil_document
from tests.query.test_query import read  # noqa: F401
from tests.stores import in_memory, stored, writer_to
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.formats import FORMATS
from trajstore.errors import ConfigurationError, StoreNotFoundError, UnknownColumnError
from trajstore.ledger import ROW, Ledger, TrainedStep
from trajstore.query import RELATIONS, Stream, relations
from trajstore.query.trained import COLUMNS

pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")

Row = dict[str, Any]


def conversation(task: str, said: list[Row], outcome: float | None = None) -> AgentTrajectory:
    return AgentTrajectory(messages=said, input_ids=torch.arange(3), task_id=task, reward=Reward(outcome=outcome))


def messages_of(added: list[AgentTrajectory]) -> list[Row]:
    """Return the expected rows of the messages relation."""
    rows = []
    for number, rollout in enumerate(added):
        turn = 0
        for at, message in enumerate(rollout.messages):
            turn += message.get("role") == "assistant"
            texts = {name: message.get(name) for name in ("role", "content", "tool_calls")}
            rows.append(
                {"trajectory_id": number, "task": rollout.task_id or None, "message": at, "turn": turn}
                | {name: v if v is None or isinstance(v, str) else _json(v) for name, v in texts.items()}
                | {
                    "tool": message.get("name") if message.get("role") == "tool" else None,
                    "arguments": None,
                    "json": _json(message),
                    "outcome": rollout.reward.outcome if rollout.reward else None,
                }
            )
    return rows


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_calls_of_models_and_the_tools_of_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"at": 1}'}}
    openai = [
        {"role": "assistant", "tool_calls": [call, {"id": "c2", "function": "seek", "arguments": {"at": 2}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "here"},
        {"role": "tool", "tool_call_id": "c2", "content": "there"},
        {"role": "tool", "tool_call_id": "lost", "name": "look", "content": "no"},
    ]
    anthropic = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "u", "name": "find", "input": {}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "v", "name": "seek", "input": {"at": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": key, "content": key} for key in "uvu"]},
        {"role": "user", "name": "anna", "content": "thanks"},
    ]
    calls = [{"message": 0, "model": "big", "seconds": 2, "cost": 0.5, "usage": {"n": 1}}, {"model": 3, "cost": True}]
    metadata: list[dict[str, Any]] = [{"calls": [*calls, "odd"], "prompt": "v1"}, {"calls": 7, "prompt": "v2"}]
    buffer = in_memory([AgentTrajectory(messages=said, metadata=metadata.pop(0)) for said in (openai, anthropic)])
    answers = buffer.query("messages").select("tool", "arguments").table()
    assert answers["arguments"].drop_nulls().to_list() == ['{"at": 1}', '{"at":2}', '{}\n{"at":3}\n{}']
    assert answers["tool"].to_list() == [None, "find", "seek", "look", None, None, "find, seek", None]
    rows = buffer.query("calls").select("message", "model", "seconds", "cost", "json").rows()
    assert [tuple(row.values())[:-1] for row in rows] == [(0, "big", 2.0, 0.5), (None, "3", None, None)]
    assert json.loads(rows[0]["json"]) == calls[0]
    count = "select metadata.prompt as prompt, count(*) as n from {} group by metadata.prompt order by prompt"
    assert buffer.query().sql(count.format("calls")).rows() == [("v1", 2)]
    assert buffer.query().sql(count.format("messages")).rows() == [("v1", 4), ("v2", 4)]
    joined = "select metadata.prompt as p, model from calls join trajectories using (trajectory_id) order by model"
    assert buffer.query().sql(joined).rows() == [("v1", "3"), ("v1", "big")]


CONDITIONS: dict[str, Callable[[Row], bool | None]] = {
    "role = 'assistant'": lambda row: row["role"] == "assistant",
    "task = 't1'": lambda row: row["task"] == "t1",
    "outcome > 0": lambda row: (row["outcome"] or 0) > 0,
    "task = 't1' and role = 'tool'": lambda row: row["task"] == "t1" and row["role"] == "tool",
    "outcome > 0 or role = 'user'": lambda row: (row["outcome"] or 0) > 0 or row["role"] == "user",
    "content like '%\u00e9%'": lambda row: "\u00e9" in (row["content"] or ""),
    "tool_calls is not null and turn = 1": lambda row: row["tool_calls"] is not None and row["turn"] == 1,
    "task is null and (message = 0 or turn > 1)": lambda row: (
        not row["task"] and (not row["message"] or row["turn"] > 1)
    ),
    "1 = 1": lambda row: True,
}

message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": st.sampled_from(
            ["caf\u00e9", "", "a\r\nb\x00\u2028", None, [{"type": "text", "text": "\u00e9"}], 7]
        ),
        "tool_calls": st.sampled_from([None, [{"function": {"name": "find", "arguments": '{"at": 1}'}}], []]),
        "name": st.just("x"),
    },
)
conversations = st.lists(
    st.builds(
        conversation,
        st.sampled_from(["t1", "t2", ""]),
        st.lists(message, max_size=4),
        st.sampled_from([None, 0.0, 1.0]),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(conversations, st.lists(st.sampled_from(list(CONDITIONS)), max_size=2), st.integers(0, 5), st.integers(1, 3))
def test_questions_about_messages_agree_with_plain_loops(
    added: list[AgentTrajectory], conditions: list[str], limit: int, together: int
) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    if added:
        buffer.add_trajectories(added)
    kept = [row for row in messages_of(added) if all(CONDITIONS[condition](row) for condition in conditions)]
    shown = [{name: value for name, value in row.items() if name != "outcome"} for row in kept]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "TOGETHER", together)
        question = buffer.query("messages")
        for condition in conditions:
            question = question.where(condition)
        assert question.rows() == shown
        assert question.limit(limit).rows() == shown[:limit]
        assert question.count() == len(kept)
        assert question.ids().tolist() == list(dict.fromkeys(row["trajectory_id"] for row in kept))
        assert [row for part in question.stream() for row in part.to_dicts()] == shown
        order = sorted(shown, key=lambda row: (-row["message"], row["trajectory_id"]))
        assert question.order_by("message desc", "trajectory_id").limit(limit).rows() == order[:limit]
        by_role = question.group_by("role", "outcome").select("count(*) as n").rows()
        grouped = {(row["role"], row["outcome"]): row["n"] for row in by_role}
        assert grouped == Counter((row["role"], row["outcome"]) for row in kept)
        where = f"where {' and '.join(f'({clause})' for clause in conditions)}" if conditions else ""
        text = f"select role, outcome, count(*) as n from messages {where} group by role, outcome"
        assert {(row["role"], row["outcome"]): row["n"] for row in buffer.query().sql(text).to_dicts()} == grouped


def tokens(length: int, prompt: int, scored: bool, dtype: torch.dtype = torch.float32) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.arange(length) * 3,
        loss_mask=(torch.arange(length) >= prompt) if scored else None,
        response_start=prompt,
        old_log_probs=-torch.arange(length - prompt).to(dtype) / 4 if scored else None,
        task_id=f"{length}",
        policy_version=length,
    )


def block(steps: int, batch: int, chunk: int, epochs: int, number: int) -> Trajectory:
    extra = torch.Generator().manual_seed(number)
    return Trajectory(
        actions=torch.zeros(steps, batch, 2),
        rewards=torch.rand(steps, batch, chunk, generator=extra),
        dones=torch.rand(steps + epochs, batch, chunk, generator=extra) < 0.3,
        versions=torch.full((steps, batch, 1), float(number)),
        prev_values=torch.rand(steps + epochs, batch, 1, generator=extra),
        curr_obs={"states": torch.zeros(steps, batch, 3)},
    )


def test_tokens_are_rows(tmp_path: Path) -> None:
    added = [
        tokens(7, 3, True),
        tokens(5, 5, False),
        tokens(4, 0, True, torch.float64),
        tokens(6, 2, True, torch.bfloat16),
    ]
    stored(tmp_path, [*added[:2], block(4, 2, 1, 0, 1), *added[2:]])
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        expected = []
        for number, rollout in zip([0, 1, 3, 4], added, strict=True):
            length, prompt = len(rollout.input_ids), rollout.response_start
            for at in range(length):
                scored = rollout.loss_mask is not None
                value = rollout.old_log_probs[at - prompt].item() if scored and at >= prompt else None
                expected.append((number, at, 3 * at, int(at >= prompt) if scored else None, value))
        asked = reader.query("tokens").select("trajectory_id", "position", "input_ids", "loss_mask", "old_log_probs")
        assert [tuple(row.values()) for row in asked.rows()] == expected
        means = reader.query("tokens").group_by("version_high").select("avg(old_log_probs) as mean").rows()
        assert means == [
            {"version_high": len(trajectory.input_ids), "mean": _mean(trajectory.old_log_probs)} for trajectory in added
        ]
        assert reader.query("tokens").where("entropys is null and task = '7'").count() == 7


def _mean(values: torch.Tensor | None) -> float | None:
    return None if values is None else values.double().mean().item()


def test_steps_are_rows_without_the_extra_ones(tmp_path: Path) -> None:
    blocks = [block(4, 3, 2, 2, 0), block(2, 1, 2, 2, 1), block(6, 2, 1, 0, 2)]
    stored(tmp_path, [blocks[0], tokens(4, 1, True), *blocks[1:]])
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        expected = []
        for number, trajectory in zip([0, 2, 3], blocks, strict=True):
            steps, batch = trajectory.rewards.shape[:2]
            epochs = len(trajectory.dones) - steps
            for t in range(steps):
                epoch = t // (steps // epochs) if epochs else 0
                for b in range(batch):
                    done = trajectory.dones[t + epoch + (1 if epochs else 0), b]
                    value = trajectory.prev_values[t + epoch, b, 0].item()
                    total = trajectory.rewards[t, b].double().sum().item()
                    version = int(trajectory.versions[t, b, 0])
                    expected.append((number, t, b, total, bool(done.any()), value, version, None))
        names = ("trajectory_id", "step", "environment", "rewards", "dones", "prev_values", "versions", "truncations")
        assert [tuple(row.values()) for row in reader.query("steps").select(*names).rows()] == expected
        text = (
            "select trajectory_id, sum(rewards) as total from steps where samples > 5 group by trajectory_id order by 1"
        )
        totals = {number: 0.0 for number, *_ in expected if number != 2}
        for number, *_, total, _, _, _, _ in (row[:8] for row in expected):
            if number in totals:
                totals[number] += total
        counts = dict(reader.query().sql(text).iter_rows())
        assert counts.keys() == totals.keys()
        assert np.allclose(list(counts.values()), list(totals.values()))


late_rows_of = st.sampled_from([None, -1.0, 0.0, 0.25, 2.0])

ROW_CONDITIONS: dict[str, Callable[[Row], bool | None]] = {
    "adv > 0": lambda row: row["adv"] is not None and row["adv"] > 0,
    "adv is null": lambda row: row["adv"] is None,
    "label = 1 and trajectory_id > 0": lambda row: row["label"] == 1 and row["trajectory_id"] > 0,
    "adv + label >= 1": lambda row: None not in (row["adv"], row["label"]) and row["adv"] + row["label"] >= 1,
    "judge > 0 or adv < 0": lambda row: (row["judge"] or 0) > 0 or (row["adv"] or 0) < 0,
}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 4), late_rows_of, st.booleans(), late_rows_of), min_size=1, max_size=6),
    st.sampled_from(list(FORMATS)),
    st.sampled_from(["tokens", "steps"]),
    st.lists(st.sampled_from(list(ROW_CONDITIONS)), max_size=2),
    st.integers(1, 3),
)
def test_questions_about_values_by_row_agree_with_plain_loops(
    tmp_path_factory: pytest.TempPathFactory,
    rollouts: list[tuple[int, float | None, bool, float | None]],
    trajectory_format: Any,
    relation: str,
    conditions: list[str],
    together: int,
) -> None:
    """Values: floats per row, integers per row (per response token if there is one), a number per trajectory."""
    path = tmp_path_factory.mktemp("rows") / "store"
    rows: list[Row] = []
    with writer_to(path, trajectory_format=trajectory_format) as writer:
        if relation == "tokens":
            writer.add_trajectories([tokens(2 + size, 2, True) for size, *_ in rollouts])
        else:
            writer.add_trajectories([block(size, 2, 1, 0, 0) for size, *_ in rollouts])
        sizes = [2 + size if relation == "tokens" else 2 * size for size, *_ in rollouts]
        shapes = [(size,) if relation == "tokens" else (size // 2, 2) for size in sizes]
        for number, (size, first, labelled, judge) in enumerate(rollouts):
            if first is not None:
                annotate(writer, number, {"adv": [torch.zeros(shapes[number])]})  # the latest values win
                annotate(writer, number, {"adv": [first + torch.arange(sizes[number]).reshape(shapes[number])]})
            labels = [at % 3 for at in range(size if relation == "tokens" else sizes[number])]
            if labelled:
                values = torch.tensor(labels)
                annotate(writer, number, {"label": [values if relation == "tokens" else values.reshape(size, 2)]})
            if judge is not None:
                annotate(writer, number, {"judge": judge})
            labels = [None] * (sizes[number] - len(labels)) + labels
            rows += [
                {
                    "trajectory_id": number,
                    "adv": None if first is None else first + at,
                    "label": labels[at] if labelled else None,
                    "judge": judge,
                }
                for at in range(sizes[number])
            ]
    names = {name for row in rows for name, value in row.items() if value is not None}
    asked = [
        condition
        for condition in conditions
        if {name for name in ("adv", "label", "judge") if name in condition} <= names
    ]
    kept = [row for row in rows if all(ROW_CONDITIONS[condition](row) for condition in asked)]
    shown = [{name: row[name] for name in row if name in names} for row in kept]
    with pytest.MonkeyPatch.context() as patch, TrajectoryReplayBuffer.open(path) as reader:
        patch.setattr(relations, "TOGETHER", together)
        question = reader.query(relation)
        for condition in asked:
            question = question.where(condition)
        assert question.select(*(name for name in rows[0] if name in names)).rows() == shown
        assert question.count() == len(kept)
        assert question.ids().tolist() == list(dict.fromkeys(row["trajectory_id"] for row in kept))
        if "adv" in names:
            best = question.where("adv is not null").order_by("adv desc", "trajectory_id").limit(1).select("adv").rows()
            assert best == [
                {"adv": value}
                for value in sorted((row["adv"] or 0 for row in kept if row["adv"] is not None), reverse=True)[:1]
            ]
            text = f"select sum(adv) as total, count(adv) as n from {relation}"
            known = [row["adv"] for row in rows if row["adv"] is not None]
            assert reader.query().sql(text).rows() == [(sum(known), len(known))]


def test_rows_of_several_numbers_are_lists_and_the_names_of_stores_may_differ(tmp_path: Path) -> None:
    for rank in range(2):
        with writer_to(tmp_path / f"rank_{rank}") as writer:
            writer.add_trajectories([block(2, 1, 1, 0, 0), tokens(3, 1, True), block(1, 1, 1, 0, 0)])
            annotate(writer, [0], {"pair": [torch.arange(4.0).reshape(2, 1, 2) if rank else torch.ones(2, 1)]})
            annotate(writer, [1], {"of_tokens": [torch.tensor([1 + 2j, 3j, 4])], "step": 1.0})
            if rank:
                annotate(writer, [0, 2], {"label": [torch.ones(2, 1), torch.full((1, 1), float("nan"))]})
            else:
                annotate(writer, [0], {"label": 7})
    with TrajectoryReplayBuffer.open(tmp_path) as run:
        table = run.query("steps").order_by("rank", "trajectory_id", "step").select("pair", "label").table()
        assert table["pair"].to_list() == [[1.0], [1.0], None, [0.0, 1.0], [2.0, 3.0], None]
        assert table["label"].to_list()[:5] == [None, None, None, 1.0, 1.0]
        assert math.isnan(table["label"].to_list()[5])
        assert run.query("tokens").where("rank = 0").select("of_tokens").table()["of_tokens"].to_list() == [
            [1.0, 2.0],
            [0.0, 3.0],
            [4.0, 0.0],
        ]
        assert "of_tokens" not in run.query("steps").sql("select * from steps").columns
        with pytest.raises(UnknownColumnError, match="pair: in the table steps"):
            run.query().where("pair is null").ids()
        with pytest.raises(ConfigurationError, match="no column 'pair'"):
            run.query("tokens").where("pair is null").rows()


def test_whole_versions_and_empty_chunks_come_as_they_are() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    version = 2**53 + 1
    versions = torch.full((1, 2), version)
    buffer.add_trajectories([Trajectory(rewards=torch.rand(1, 2, 0)), Trajectory(rewards=versions, versions=versions)])
    rows = buffer.query("steps").select("trajectory_id", "rewards", "prev_values", "versions").rows()
    assert [tuple(row.values()) for row in rows] == [
        *[(0, 0.0, None, None)] * 2,
        *[(1, float(version), None, version)] * 2,
    ]


def test_facts_choose_what_is_read(tmp_path: Path, read: list[int]) -> None:  # noqa: F811
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path))
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "there"}]
    buffer.add_trajectories([conversation(f"t{n % 4}", messages, float(n % 2)) for n in range(12)])
    annotate(buffer, [3, 7], {"judge": [0.5, 0.25], "role": "a role of its own"})
    buffer.flush()
    text = "select task, count(*) from messages where role = 'user' and outcome = 1 and task = 't3' group by task"
    assert buffer.query().sql(text).rows() == [("t3", 3)]
    assert read == [3, 7, 11]
    read.clear()
    assert buffer.query("messages").where("judge > 0.3").where("role = 'user'").ids().tolist() == [3]
    assert buffer.query().where("judge < 0.3").sql("select role from messages").rows() == [("user",), ("assistant",)]
    assert read == [3, 7]


def test_no_more_is_read_than_wanted(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(relations, "TOGETHER", 2)
    buffer = in_memory([conversation("t", [{"role": "user", "content": str(n)}]) for n in range(400)])
    assert [row["content"] for row in buffer.query("messages").limit(3).rows()] == ["0", "1", "2"]
    assert len(read) <= 4


def test_what_cannot_be_read_is_named_and_its_neighbours_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = [{"role": "user", "content": "?"}]
    path = stored(tmp_path / "store", [conversation(f"{n}", messages) for n in ("first", "second", "third")])
    spoil_document(next((path / "shards").iterdir()), b'second"')
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        assert reader.query("messages").where("role is not null").ids().tolist() == [0, 2]
        assert caplog.messages[-1].startswith("1 trajectory cannot be read, so the answer lacks messages: 1")
        assert len(set(reader.query("tokens").ids().tolist())) == 3  # its tokens are intact


@pytest.mark.parametrize("relation", ["tokens", "steps"])
def test_a_lost_file_takes_the_same_rows_from_every_answer(tmp_path: Path, relation: str) -> None:
    trajectory = tokens(4, 2, True) if relation == "tokens" else block(2, 2, 1, 0, 0)
    stored(tmp_path, [trajectory] * 3, each=True)
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        sorted((tmp_path / "shards").iterdir())[1].unlink()
        assert reader.query(relation).ids().tolist() == [0, 2]
        assert reader.query(relation).count() == len(reader.query(relation).rows()) == 8
        assert reader.query().sql(f"select count(*) from {relation}").item() == 8


def test_a_stream_is_of_one_moment_and_can_be_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    duckdb, pandas = pytest.importorskip("duckdb"), pytest.importorskip("pandas")
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    with writer_to(tmp_path) as writer:
        messages = [
            {"role": "user", "content": "caf\u00e9"},
            {"role": "assistant"},
            {"role": "tool", "content": "x" * 900},
        ]
        writer.add_trajectories([conversation(f"t{n % 3}", messages[: 1 + n % 3], float(n % 2)) for n in range(1200)])
        asked = (
            writer.query("messages").where("outcome > 0").select("task", "role", "content").order_by("message").stream()
        )
        assert isinstance(asked, Stream)
        writer.add_trajectories([conversation("later", messages, 1.0)])
        whole = writer.query("messages").where("outcome > 0 and task != 'later'")
        expected = whole.select("task", "role", "content").order_by("message").table()
        counts = Counter(expected["role"].to_list())
        for _ in range(2):
            assert dict(duckdb.sql("select role, count(*) from asked group by role").fetchall()) == counts
            assert pl.DataFrame(asked).equals(expected)
        assert len(pandas.DataFrame.from_arrow(asked)) == len(expected)
        assert (
            datasets.Dataset(pyarrow.table(asked)).filter(lambda row: row["role"] == "tool").num_rows == counts["tool"]
        )
        first = next(iter(pyarrow.RecordBatchReader.from_stream(asked)))  # the rest is never requested
        assert first.column("role")[0].as_py() == "user"
        grouped = writer.query().stream("select role, count(*) as n from messages group by role order by n")
        assert pandas.DataFrame.from_arrow(grouped)["n"].tolist() == sorted(
            Counter(writer.query("messages").table()["role"]).values()
        )
        writer.evict([1, 3])
        assert len(pl.DataFrame(asked)) == len(expected) - 2 - 1
        assert "2 trajectories cannot be read, so the answer lacks messages: 1, 3; the first" in caplog.text


def test_steps_of_rlinf_are_asked(shared_fixtures: Path) -> None:
    path = next(path for path in sorted((shared_fixtures / "rlinf").iterdir()) if (path / "metadata.json").is_file())
    with TrajectoryReplayBuffer.open(path) as reader:
        assert reader.query().ids().tolist() == reader.trajectory_ids.tolist()
        assert reader.query().select("sum(samples) as n").rows() == [{"n": reader.total_samples}]
        there = reader.query().where("readable").ids().tolist()
        expected = [reader.get(number).rewards.double().sum().item() for number in there]
        rows = reader.query("steps").group_by("trajectory_id").select("sum(rewards) as total").rows()
        assert [row["trajectory_id"] for row in rows] == there
        assert np.allclose([row["total"] for row in rows], expected)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda b: b.query("mesages"), "relation: 'mesages', must be one of 'trajectories', 'messages'"),
        (lambda b: b.query("messages").where("rolle = 'x'").rows(), "no column 'rolle'; did you mean 'role'"),
        (lambda b: b.query().sql("select rolle from messages"), "no column 'rolle'; did you mean 'role'"),
        (lambda b: b.query().sql("select rolle from trajectories"), "no column 'rolle'; a key of a rollout's metadata"),
        (lambda b: b.query().sql("select c.usage from calls c"), "no column 'usage'.* in its json, and DuckDB reads"),
        (lambda b: b.query().sql("with x as (select task from calls) select model from x"), '"model".*valid columns'),
        (lambda b: b.query("calls").where("usage = 1").rows(), "no column 'usage'.* are in its json, and DuckDB reads"),
        (lambda b: b.query("calls").select("json->>'$.usage'").rows(), "usage: Polars' SQL takes no .* DuckDB reads"),
        (lambda b: b.query("calls").where("json->>'a' = 'b'").rows(), "Polars' SQL takes no .* DuckDB reads"),
        (lambda b: b.query().sql("select json_extract(json, '$.a') from calls"), "json_extract.* DuckDB reads"),
        (lambda b: b.query().stream("select 1 from mesages"), "there is trajectories, messages, calls, tokens, steps"),
        (lambda b: b.query("messages").sql("select 1 from tokens"), "there is messages"),
        (lambda b: b.query("messages").where("cast(content as int) > 3").rows(), "query: .*conversion"),
    ],
)
def test_a_wrong_question_is_told_where_it_is_wrong(ask: Callable[[Any], Any], said: str) -> None:
    buffer = in_memory([conversation("t", [{"role": "user", "content": "no number"}])])
    with pytest.raises(ConfigurationError, match=said):
        ask(buffer)


def test_every_column_is_there_in_an_empty_answer() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    for name, columns in RELATIONS.items():
        assert buffer.query(name).table().columns == ["trajectory_id", "task", *columns]
        [none] = buffer.query(name).stream()
        assert none.columns == ["trajectory_id", "task", *columns]


ENDS_EARLY = """
import time
import polars as pl
import torch
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore._core.formats import FORMATS
from trajstore.query import Query, relations

buffer = TrajectoryReplayBuffer(sample_window_size=0)
buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(2)) for _ in range(4096)])
portions = []

def read(asked):
    portions.append(len(asked.facts))
    for _ in range(500 if len(portions) > 1 else 0):
        time.sleep(0.002)
    return [asked.facts.with_columns(content=pl.lit("said")).select(asked.wanted)], []

facts = buffer.query().table()
scan = lambda relation, facts: relations.scan(read, lambda relation: {}, relation, facts)
found = Query(lambda: facts, scan, "messages").where("content like 'said'").select("content").limit(1).rows()
assert found == [{"content": "said"}], found
"""


def test_a_program_ends_while_polars_reads_more_than_it_was_asked_for(tmp_path: Path) -> None:
    done = programs.run(tmp_path, ENDS_EARLY)
    assert (done.returncode, done.stderr) == (0, "")


def test_trained_has_the_rows_of_the_ledgers_with_the_facts_of_their_trajectories(tmp_path: Path) -> None:
    """Two ranks; the second one's ledger also has a row in no store and one of an evicted rollout."""
    for rank in (0, 1):
        folder = stored(tmp_path / f"rank_{rank}", [conversation("a", []), conversation("b", [], outcome=0.5 + rank)])
        with Ledger(folder / "ledger") as ledger:
            for step in (1, 2):
                made = np.zeros(4, ROW)
                made["trajectory"], made["group"] = [-1, 0, 1, 9], [0, 0, 1, 1]
                made["version"], made["replayed"] = [-1, 0, 1, step], made["trajectory"] == 1
                ledger.record(TrainedStep(step, made[: 4 if rank else 3], ["a", "b"], policy_before=step))
    reader = TrajectoryReplayBuffer.open(tmp_path)
    rows = reader.query("trained").select("step", "rank", "trajectory_id", "rollout", "task", "outcome", "age").rows()
    ids = {(rank, own): (rank + 1 << 42) + own for rank in (0, 1) for own in (0, 1, 9)}
    assert [tuple(row.values()) for row in rows] == [
        row
        for step in (1, 2)
        for rank in (0, 1)
        for row in [
            (step, None, None, 0, "a", None, None),
            (step, rank, ids[rank, 0], None, "a", None, step),
            (step, rank, ids[rank, 1], None, "b", 0.5 + rank, step - 1),
            *[(step, None, ids[rank, 9], None, "b", None, 0)] * rank,
        ]
    ]
    assert reader.query("trained").where("replayed and step = 2").ids().tolist() == [ids[0, 1], ids[1, 1]]
    assert reader.query("trained").table().columns == ["trajectory_id", "task", *COLUMNS]
    joined = "select t.step, x.task from trained t join trajectories x on t.trajectory_id = x.trajectory_id"
    assert reader.query().where("outcome > 1").sql(joined).rows() == [(1, "b"), (2, "b")]
    with pytest.raises(ConfigurationError, match="a buffer in memory has no training ledger"):
        in_memory([]).query("trained").rows()
    with pytest.raises(StoreNotFoundError, match="ledger: there is no ledger"):
        TrajectoryReplayBuffer.open(stored(tmp_path / "other", [conversation("a", [])])).query("trained").rows()


def test_conditions_on_columns_of_rows_name_their_table() -> None:
    buffer = in_memory([Trajectory(rewards=torch.rand(3, 2, 1), dones=torch.zeros(3, 2, 1, dtype=torch.bool))])
    with pytest.raises(UnknownColumnError, match=r"rewards: in the table steps.*query\('steps'\).where\('rewards > 2'"):
        buffer.query().where("rewards > 2").ids()
    with pytest.raises(UnknownColumnError, match="rewards, dones: in the table steps"):
        buffer.sample(2, where="rewards > 2 and dones")
