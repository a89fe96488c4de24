"""Queries about trajectories, against a plain filter over the added ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores import in_memory, stored, writer_to
from tests.support.witness import witness
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate
from trajstore._core.reading.contents import Contents
from trajstore.errors import ConfigurationError, MissingDependencyError
from trajstore.interop.convert import convert_to
from trajstore.operations.conversion import convert
from trajstore.operations.mending import prune
from trajstore.query import FACTS, readable
from trajstore.samplers import GroupSampler

pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def rollout(
    task: str = "t1", outcome: float | None = 1.0, version: int | None = 3, judge: float | None = None, turns: int = 1
) -> AgentTrajectory:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "\x1b[2J done"}] * turns
    scores = {} if judge is None else {"judge": judge, "why": "text is no score"}
    return AgentTrajectory(
        messages=messages,
        input_ids=torch.arange(6),
        response_start=2,
        old_log_probs=torch.zeros(4),
        reward=None if outcome is None and not scores else Reward(outcome=outcome, metadata=scores),
        task_id=task,
        policy_version=version,
    )


Facts = dict[str, Any]

CONDITIONS: dict[str, Callable[[Facts], bool | None]] = {
    "task = 't1'": lambda one: one["task"] == "t1",
    "task is null": lambda one: not one["task"],
    "outcome > 0": lambda one: one["outcome"] is not None and one["outcome"] > 0,
    "outcome is null": lambda one: one["outcome"] is None,
    "outcome > 0 and version_high >= 2": lambda one: (one["outcome"] or 0) > 0 and (one["version"] or 0) >= 2,
    "task in ('t1', 't2') or turns = 3": lambda one: one["task"] in ("t1", "t2") or one["turns"] == 3,
    "not (task = 't1')": lambda one: bool(one["task"]) and one["task"] != "t1",  # null matches neither condition
    "turns between 2 and 3 and task like 't%'": lambda one: one["turns"] in (2, 3) and one["task"].startswith("t"),
}

rollout_facts = st.fixed_dictionaries(
    {
        "task": st.sampled_from(["t1", "t2", "it's", ""]),
        "outcome": st.sampled_from([None, 0.0, 0.5, 1.0, -1.0]),
        "version": st.none() | st.integers(0, 4),
        "turns": st.integers(1, 3),
    }
)


@settings(max_examples=40)
@given(st.lists(rollout_facts, max_size=12), st.data())
def test_questions_agree_with_a_plain_filter(added: list[Facts], data: st.DataObject) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    if added:
        buffer.add_trajectories(
            [rollout(record["task"], record["outcome"], record["version"], None, record["turns"]) for record in added]
        )
    conditions = data.draw(st.lists(st.sampled_from(list(CONDITIONS)), max_size=2))
    question = buffer.query()
    for condition in conditions:
        question = question.where(condition)
    kept = [at for at, record in enumerate(added) if all(CONDITIONS[condition](record) for condition in conditions)]
    assert question.ids().tolist() == kept
    limit = data.draw(st.integers(0, 5))
    order = sorted(kept, key=lambda at: (-added[at]["turns"], at))
    assert question.order_by("turns desc").limit(limit).ids().tolist() == order[:limit]
    grouped = question.group_by("task").select("count(*) as n", "sum(outcome) as total", "max(turns) as most").rows()
    tasks = list(dict.fromkeys(added[at]["task"] or None for at in kept))
    assert [row["task"] for row in grouped] == tasks
    for row in grouped:
        mine = [added[at] for at in kept if (added[at]["task"] or None) == row["task"]]
        assert row["n"] == len(mine)
        known = [record["outcome"] for record in mine if record["outcome"] is not None]
        assert row["total"] == (sum(known) if known else None)
        assert row["most"] == max(record["turns"] for record in mine)
    text = "select task, count(*) as n from trajectories group by task order by n, task"
    assert sorted(question.sql(text).rows(), key=repr) == sorted(((row["task"], row["n"]) for row in grouped), key=repr)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("select task, avg(outcome), count(*) from trajectories group by task", ["task", "avg(outcome)", "count(*)"]),
        ("select max(outcome) as most, avg(outcome) mean from trajectories", ["most", "mean"]),
        ("select max(\n  outcome) -- , and no more\nfrom trajectories", ["max( outcome)"]),
        (
            "with t as (select task as a from trajectories) select distinct a || ', from', a from t",
            ["a || ', from'", "a"],
        ),
        ("select sum(outcome) over (partition by task) from trajectories", ["sum(outcome) over (partition by task)"]),
        ("select t.task from trajectories join trajectories as t on t.task = trajectories.task", ["task"]),
        ("select avg(outcome) from trajectories union all select 1.5 from trajectories", ["avg(outcome)"]),
    ],
)
def test_columns_without_a_name_are_called_as_they_are_written(text: str, names: list[str]) -> None:
    buffer = in_memory([rollout("ab"[at % 2], float(at), None, None, 1) for at in range(4)])
    assert buffer.query().sql(text).columns == names
    question = buffer.query().group_by("lower(task)").select("avg(outcome)", "max(outcome)", "count(*)")
    assert question.order_by("avg(outcome) desc").rows() == [
        {"lower(task)": "b", "avg(outcome)": 2.0, "max(outcome)": 3.0, "count(*)": 2},
        {"lower(task)": "a", "avg(outcome)": 1.0, "max(outcome)": 2.0, "count(*)": 2},
    ]
    assert buffer.query().select("task", "outcome + 1", "turns as t").table().columns == ["task", "outcome + 1", "t"]


@pytest.mark.parametrize(
    ("order", "tasks"),
    [
        ("count(*) desc", "cba"),
        ("COUNT( * )", "abc"),
        ("avg(outcome)", "cba"),
        ("sum(outcome) * 2.0 desc", "acb"),
        ("n * mean desc", "acb"),
    ],
)
def test_groups_are_sorted_by_what_is_selected(order: str, tasks: str) -> None:
    buffer = in_memory([rollout(letter, {"a": 8.0, "b": 1.0, "c": 0.9}[letter]) for letter in "abcbcc"])
    grouped = buffer.query().group_by("lower(task) as task")
    asked = grouped.select("count(*) as n", "avg(outcome) as mean", "sum(outcome) * 2.0")
    assert "".join(row["task"] for row in asked.order_by(order).rows()) == tasks
    assert asked.order_by(order).limit(1).rows() == asked.order_by(order).rows()[:1]
    assert [row["count(*)"] for row in grouped.order_by("count(*) desc").rows()] == [3, 2, 1]


@pytest.mark.parametrize("order", [["outcome desc", "turns"], ["outcome + turns desc"], ["task desc", "task"]])
def test_the_first_rows_are_those_of_the_whole_order(order: list[str]) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    outcomes = [None, 1.0, 0.0, 1.0, None, 0.5, 0.0, 1.0]
    buffer.add_trajectories(
        [rollout("abb"[at % 3], outcome, None, None, 1 + at % 2) for at, outcome in enumerate(outcomes)]
    )
    question = buffer.query().order_by(*order)
    whole = question.table()
    for limit in (0, 1, 3, 8, 9):
        assert question.limit(limit).table().equals(whole.head(limit))
        assert question.limit(limit).ids().tolist() == whole["trajectory_id"].to_list()[:limit]
        assert question.limit(limit).select("task").table().equals(whole.select("task").head(limit))
    assert len(question.where("task = 'none'").limit(3).table()) == 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the ids of rollouts whose documents queries read."""
    ids: list[int] = []
    token_rows = readable.token_rows

    def noted(contents: Any, positions: Any, names: Any) -> Any:
        ids.extend(contents.index.at("trajectory_id", positions).tolist())
        return token_rows(contents, positions, names)

    monkeypatch.setattr(readable, "token_rows", noted)
    return ids


def test_a_reader_follows_and_reads_no_rollout(tmp_path: Path, read: list[int]) -> None:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout("a", judge=0.25), witness(5), rollout("b", outcome=None)])
        assert writer.query().where("task = 'a'").ids().tolist() == [0]  # possibly uncommitted
        writer.flush()
        reader = TrajectoryReplayBuffer.open(tmp_path / "store")
        assert reader.query().where("kind = 'step'").ids().tolist() == [1]
        assert reader.query().where("reward_judge > 0.2").ids().tolist() == [0]
        writer.add_trajectories([rollout("b", outcome=0.0, judge=0.5)])
        writer.evict([0])
        writer.flush()
        assert reader.query().count() == 3
        reader.refresh()
        assert reader.query().where("task is not null").ids().tolist() == [2, 3]
        assert reader.query().where("reward_judge is not null").ids().tolist() == [3]
        assert reader.query().rows() == TrajectoryReplayBuffer.open(tmp_path / "store").query().rows()
        row = reader.query().where("trajectory_id = 1").rows()[0]
        first = witness(5)
        assert first.rewards is not None
        assert (row["steps"], row["batch"], row["samples"]) == (
            *first.rewards.shape[:2],
            first.rewards.shape[:2].numel(),
        )
        assert set(FACTS) | {"reward_judge"} == set(row)
        reader.close()
    assert read == []
    writer.save_checkpoint(tmp_path / "copy")
    assert _without_times(TrajectoryReplayBuffer.open(tmp_path / "copy")) == _without_times(writer)
    assert read == []


def _without_times(buffer: TrajectoryReplayBuffer) -> list[dict[str, Any]]:
    table = buffer.query().table()
    return table.drop("committed", "trajectory_id").to_dicts()


def test_what_was_not_recorded_is_null(tmp_path: Path) -> None:
    said = AgentTrajectory(messages=[{"role": "assistant", "content": "12"}], reward=Reward(outcome=1.0))
    for buffer in (in_memory([]), writer_to(tmp_path)):
        with buffer:
            buffer.add_trajectories([said, rollout(), said, AgentTrajectory(input_ids=torch.arange(2)), witness(5)])
            sizes = buffer.query().select("steps", "batch", "response", "max_episode_length").table().rows()
            assert sizes[:4] == [(None,) * 4, (6, None, 4, None), (None,) * 4, (2, None, None, None)]
            assert buffer.query().sql("select avg(steps) from trajectories where outcome = 1").item() == 6
            assert buffer.query().where("steps is null").ids().tolist() == [0, 2]


def test_groups_are_drawn_without_reading_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, [rollout(f"t{n % 3}") for n in range(9)])
    reader = TrajectoryReplayBuffer.open(tmp_path)
    monkeypatch.setattr(Contents, "make_resident", None)
    assert sorted(reader.draw(3, sampler=GroupSampler()).ids.tolist()) == list(range(9))


def test_more_scores_than_an_index_has_stay_in_the_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    for n in range(70):
        buffer.add_trajectories(
            [AgentTrajectory(input_ids=torch.arange(3), reward=Reward(metadata={f"s{n}": float(n)}), task_id="t")]
        )
    names = [name for name in buffer.query().table().columns if name.startswith("reward_")]
    assert names == sorted(f"reward_s{n}" for n in range(64)), "in the order of their names"
    assert caplog.text.count("'reward_s64' is no fact here") == 1
    assert buffer.get(69).reward.metadata == {"s69": 69.0}


def test_values_of_two_kinds_in_two_ranks_are_all_there(tmp_path: Path) -> None:
    """A name holds numbers in one rank and texts in another; neither becomes null."""
    for rank, judge in enumerate((0.5, "good")):
        with writer_to(tmp_path / f"rank_{rank}") as writer:
            ids = writer.add_trajectories([rollout(), rollout()])
            annotate(writer, ids[:1], {"judge": judge})
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        assert [row["judge"] for row in reader.query().select("judge").rows()] == ["0.5", None, "good", None]


def test_a_condition_of_a_thousand_parts_is_answered() -> None:
    buffer = in_memory([rollout(f"t{number}") for number in range(3)])
    condition = " or ".join(f"task = 't{number}'" for number in range(1, 1000))
    assert buffer.query().where(condition).ids().tolist() == [1, 2]
    values = ", ".join(f"-{number}" for number in range(2000))
    assert buffer.query().where(f"trajectory_id in ({values})").ids().tolist() == [0]


@pytest.mark.parametrize("joined", [" or ", " AND ", "+", " xor ", " when true then "])
def test_too_many_operators_are_refused_at_once(joined: str) -> None:
    query, text = in_memory([rollout()]).query(), joined.join(["outcome = 1"] * 1002)
    calls = (query.where, query.select, query.group_by, query.order_by, lambda one: query.sql(f"select {one}"))
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"1,001 operators \(.*\), must have at most 1,000; .* are a list"):
            call(text).rows()


@pytest.mark.parametrize(
    "condition",
    [
        "count(*) > 3",
        "outcome > avg(outcome)",
        "quantile_cont(outcome, 0.5) > 0 or turns > 1",
        "string_agg(task, ',') = 'a'",
        "sum(outcome) over (partition by task) > 1",
        "outcome > (select avg(outcome) from trajectories)",
        "exists(select 1)",
    ],
)
def test_a_condition_is_about_one_row(tmp_path: Path, condition: str) -> None:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout("Len"), rollout("select")])
        question = writer.query()
        assert question.where("task = 'Len' or task = 'avg(outcome)'").ids().tolist() == [0]
        assert question.where("task in ('select') and turns > 0").ids().tolist() == [1]
    for ask in (
        lambda: question.where(condition).ids(),
        lambda: question.group_by("task").where(condition).rows(),
        lambda: writer.query("messages").where(condition).ids(),
        lambda: prune(tmp_path / "store", condition, dry_run=False),
        lambda: convert_to(tmp_path / "store", tmp_path / "out", "jsonl", where=condition),
        lambda: convert(tmp_path / "store", tmp_path / "out", "pt", where=condition),
    ):
        with pytest.raises(ConfigurationError, match=r"where: .*: a condition is about one row.* HAVING for groups"):
            ask()
    assert len(TrajectoryReplayBuffer.open(tmp_path / "store")) == 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def judged(tmp_path: Path) -> Any:
    """Three rollouts with a judge's verdict as text."""
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(f"t{at}", at / 4) for at in range(3)])
        annotate(writer, [0, 1, 2], {"judge": ["9.4", "10.2", "none"]})
        yield writer


@pytest.mark.parametrize(
    "condition",
    [
        "judge < 9.5",
        "9.5 > judge",
        "judge in (9.4, 10.2)",
        "judge between .5 and 9.5",
        "not judge is distinct from 9.4",
        "judge < 9",
        "judge > outcome",
        "split_part(task, 't', 2) > 0.5",
        "case when judge < 9.5 then true else false end",
    ],
)
def test_texts_are_not_compared_with_numbers(judged: Any, condition: str) -> None:
    for ask in (
        lambda: judged.query().where(condition).ids(),
        lambda: judged.query().select(f"{condition} as found").rows(),
        lambda: judged.query().sql(f"select task from trajectories where {condition}"),
        lambda: judged.query().sql(f"select sum(case when {condition} then 1 else 0 end) from trajectories"),
    ):
        with pytest.raises(ConfigurationError, match=r"try_cast\(NAME as double\) makes a number of a text"):
            ask()


def test_numbers_with_a_point_are_floats(judged: Any) -> None:
    assert judged.query().where("try_cast(judge as double) < 9.5 and outcome in (0.0, 0.25)").ids().tolist() == [0]
    assert judged.query().where("task = '0.5' or judge = '9.4' -- 0.5\n").ids().tolist() == [0]
    text = "select count(*) * 1.0 / 7, avg(outcome) * .1 as tenth, quantile_cont(outcome, 0.5) as mid, 1.5e-3 as small"
    answer = judged.query().sql(f"{text}, '1.5' as \"2.5\" from trajectories")
    assert answer.rows() == [(3 / 7, 0.25 * 0.1, 0.25, 0.0015, "1.5")]
    assert answer.columns == ["count(*) * 1.0 / 7", "tenth", "mid", "small", "2.5"]
    assert judged.query().select("count(*) / 4.0").rows() == [{"count(*) / 4.0": 0.75}]


def test_a_pattern_that_escapes_is_refused() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    contents = ["100% done", "100\\% done", r"\boxed{4}", "1000 done"]
    buffer.add_trajectories(
        [AgentTrajectory(messages=[{"role": "assistant", "content": content}]) for content in contents]
    )
    asked = buffer.query("messages")
    for condition in (r"content like '%100\% done%'", r"content not ilike 'a\_b'", "content like '%100!%%' escape '!'"):
        with pytest.raises(ConfigurationError, match="like cannot escape % and _; a regular expression finds them"):
            asked.where(condition).ids()
        with pytest.raises(ConfigurationError, match=r"sql: .*like cannot escape"):
            buffer.query().sql(f"select content from messages where {condition}")
    assert asked.where("content ~ '100% done'").ids().tolist() == [0]
    assert asked.where(r"content like '%\boxed{4}%'").ids().tolist() == [2]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda q: q.where("taks = 1").ids(), "where: 'taks = 1': there is no column 'taks'; .* 'task'"),
        (lambda q: q.where("outcome >").ids(), "where: 'outcome >': unable to parse 'outcome >'"),
        (lambda q: q.where("outcome > > 1").ids(), "where: 'outcome > > 1': unable to parse"),
        (lambda q: q.where("outcome").ids(), "where: 'outcome' is Float64, not true or false"),
        (lambda q: q.where("outcome > 'x'").ids(), "cannot compare"),
        (lambda q: q.where("committed > '2026-01-31'").ids(), "like this: cast.committed as timestamp."),
        (
            lambda q: q.where("outcome > 0 terminated").ids(),
            "where: .*: 'terminated' at the end has no effect; add an operator",
        ),
        (lambda q: q.order_by("turns dsc").ids(), "order_by: 'turns dsc': 'dsc' at the end has no effect"),
        (lambda q: q.where(3), "where: 3, must be an SQL expression"),
        (lambda q: q.where("task = '\udcff'").ids(), "where: .*: is not valid Unicode"),
        (lambda q: q.select("task, turns").rows(), "select: 'task, turns': has several expressions; pass each"),
        (lambda q: q.order_by("lower(task), turns desc").ids(), "order_by: .* as its own argument"),
        (lambda q: q.select("(select 1)").rows(), "select: .*: sql has subqueries"),
        (lambda q: q.select("foo(outcome)").rows(), "select: 'foo(outcome)': unsupported"),
        (lambda q: q.group_by("task").ids(), "ids: .* rows have no ids"),
        (lambda q: q.order_by("nothing").rows(), "order_by: 'nothing': there is no column"),
        (lambda q: q.limit(-1), "limit"),
        (lambda q: q.where('task = "t1"').ids(), "where: .*: there is no column 't1'; .* quotes: 't1'$"),
        (lambda q: q.where("data_source = 1").ids(), "no column .data_source.; .*would be metadata.data_source"),
        (
            lambda q: q.group_by("task").select("count(*) as n", "task").rows(),
            "select: 'task': is in the result already, like all columns of group_by",
        ),
        (
            lambda q: q.group_by("low").select("lower(task) as low").rows(),
            r"group_by: 'low': select is too late to name it; group_by('lower(task) as low') does",
        ),
        (lambda q: q.order_by("count(*) desc").ids(), "order_by: 'count(.)' is one value for all rows"),
        (
            lambda q: q.group_by("task").select("count(*) as n").order_by("max(n)").rows(),
            "order_by: 'max(n)' is one value for all rows; .*groups by selected columns",
        ),
        (
            lambda q: q.group_by("task").order_by("max(turns) / 2").rows(),
            "order_by: .* no column 'turns'; .*; groups are sorted by selected columns",
        ),
        (lambda q: q.sql("select 1 from elsewhere"), "sql: .*elsewhere"),
        (lambda q: q.sql("selec"), "sql: .selec.: it must be a SELECT"),
    ],
)
def test_a_wrong_question_is_told_where_it_is_wrong(ask: Callable[[Any], Any], said: str) -> None:
    buffer = in_memory([rollout(), rollout("t2", 0.0)])
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(").replace(")", r"\)")):
        ask(buffer.query())
    assert len(buffer) == 2


METADATA: list[dict[str, Any] | None] = [
    {"source": "math", "tool": {"error": True, "exit code": 3}, "score": 2, "mixed": 3},
    {"source": "code", "tool": {"error": False}, "score": 0.5, "mixed": "x", "big": 1 << 63},
    {"source": None, "tool": 7, "mixed": True, "deep": {"a": {"b": "c"}}},
    {},
    None,
]


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("metadata.source = 'math'", [0]),
        ("metadata.source is null", [2, 3, 4, 5]),
        ("metadata.source != 'math' or metadata.deep.a.b = 'c'", [1, 2]),
        ("metadata.tool.error", [0]),
        ("not metadata.tool.error", [1]),
        ("metadata.tool.\"exit code\" > 2 and kind = 'agent'", [0]),
        ("metadata.score >= 0.5", [0, 1]),
        ("metadata.big > 1", [1]),
        ("metadata.mixed = '3' or metadata.mixed = 'true'", [0, 2]),
        ("metadata.nothing > 3", []),
        ("task = 'metadata.source'", []),
    ],
)
def test_conditions_on_metadata(tmp_path: Path, condition: str, ids: list[int]) -> None:
    rollouts = [AgentTrajectory(input_ids=torch.arange(3), metadata=given) for given in METADATA]  # type: ignore[arg-type]
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([*rollouts, witness(1)])
        assert writer.query().where(condition).ids().tolist() == ids  # before the commit
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        assert reader.query().where(condition).ids().tolist() == ids
        assert reader.query().where(condition).table().columns == reader.query().table().columns
        answer = reader.query().sql(f"select trajectory_id from trajectories where {condition}")
        assert answer["trajectory_id"].to_list() == ids
        assert reader.query("tokens").where(condition).ids().tolist() == [number for number in ids if number < 5]
    if ids:  # else it is refused
        converted = convert_to(tmp_path / "store", tmp_path / "out.parquet", "parquet", where=condition)
        assert converted.written == len([number for number in ids if number < 5])
    assert prune(tmp_path / "store", condition).trajectories == len(ids)


def test_metadata_in_answers_and_what_no_column_can_hold(caplog: pytest.LogCaptureFixture) -> None:
    buffer = in_memory([AgentTrajectory(input_ids=torch.arange(3), metadata=given or {}) for given in METADATA])
    query = buffer.query()
    rows = query.group_by("metadata.source").select("max(metadata.score) as most").order_by("metadata.source").rows()
    assert rows == [
        {"metadata.source": "code", "most": 0.5},
        {"metadata.source": "math", "most": 2.0},
        {"metadata.source": None, "most": None},
    ]
    assert query.sql("select metadata.source, 2 * metadata.score from trajectories limit 1").rows() == [("math", 4.0)]
    assert query.order_by("metadata.score desc").select("metadata.score").limit(2).rows()[1] == {"metadata.score": 0.5}
    with pytest.raises(
        ConfigurationError, match=r"metadata.deep: an object in trajectory 2; .* metadata.deep.KEY: .* a"
    ):
        query.where("metadata.deep = 1").ids()
    buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(3), task_id="list", metadata={"source": ["a"]})])
    for key, said in (
        ("metadata.source", "metadata.source: has a list in trajectory 5; .* The table 'calls'"),
        ('metadata.source."0".cost', "metadata.source.*: has a list in trajectory 5"),
        ("metadata.source[1]", r"metadata.source\[...\]: lists in metadata have no columns"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            query.where(f"{key} = 'a'").ids()
    caplog.clear()
    assert len(query.where("metadata.nosuch = 'a' and task is null").ids()) == 0
    assert caplog.messages == ["metadata.nosuch: none of the 5 rollouts that were read has it"]
    assert query.where("task is null and metadata.source = 'math'").ids().tolist() == [0]  # reads these alone


def test_the_package_that_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "polars", None)
        with pytest.raises(MissingDependencyError, match=r"trajstore\[query\]"):
            TrajectoryReplayBuffer().query().ids()
    monkeypatch.setattr(pl, "__version__", "1.44.2")
    with pytest.raises(MissingDependencyError, match=r"'polars>=2': .*trajstore\[query\]"):
        TrajectoryReplayBuffer().query().ids()


@pytest.mark.parametrize("zone", ["EAST-9", "WEST+8"])  # 9 hours before UTC, 8 hours after
def test_the_present_time_is_in_utc_wherever_the_machine_is(
    zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([AgentTrajectory(task_id="now()", reward=Reward(outcome=0.0))])
        buffer.flush()
        at = "cast(committed as timestamp)"
        for present in ("now()", "NOW( )", "current_timestamp", "current_timestamp()", "localtimestamp"):
            old = buffer.query().where(f"{at} < {present} - interval '1 hour' or {at} > {present}")
            assert old.count() == 0, present
        assert buffer.query().where("task = 'now()' and cast(committed as date) = current_date").count() == 1
        (row,) = buffer.query().sql(f"select now() - {at} as age from trajectories").rows()
        assert timedelta() <= row[0] < timedelta(minutes=30)
    monkeypatch.undo()
    time.tzset()
