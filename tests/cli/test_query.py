"""Output of ``list`` and ``query``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.stores import Run, write_store
from tests.query.test_query import rollout
from tests.stores import writer_to
from trajstore import AgentTrajectory, annotate

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with writer_to(tmp_path / "store") as buffer:
        buffer.add_trajectories([rollout(f"t{n % 2}", float(n % 3 == 0), n, judge=n / 8) for n in range(8)])
        buffer.points.pin("before")
        buffer.add_trajectories([rollout("\x1b]0;a title\x07", None)])
    return tmp_path / "store"


def test_list_shows_the_newest_first_and_says_how_many_there_are(run: Run, store: Path) -> None:
    out = run.out("list", store, "--limit", 3)
    assert [line.split()[0] for line in out.splitlines()[:-1]] == ["trajectory_id", "8", "7", "6"]
    assert out.splitlines()[-1] == "3 of 9 trajectories; --limit 0 shows all"
    assert "\x1b" not in out
    _, out, _ = run(
        "list", store, "--where", "outcome > 0", "--columns", "trajectory_id,reward_judge", "--sort", "reward_judge"
    )
    assert [line.split() for line in out.splitlines()] == [
        ["trajectory_id", "reward_judge"],
        ["0", "0"],
        ["3", "0.375"],
        ["6", "0.75"],
    ]
    out = run.out("list", write_store(store.parent / "steps", range(2)))
    assert out.splitlines()[0].split() == ["trajectory_id", "steps", "batch", "version_high", "committed"]
    assert "reward_NAME" not in out


def test_list_begins_with_what_was_committed_last_in_any_rank(run: Run, tmp_path: Path) -> None:
    with writer_to(tmp_path / "rank_0") as first, writer_to(tmp_path / "rank_1") as second:
        for number in range(3):
            for writer in (second, first):
                writer.add_trajectories([rollout(f"t{number}", None if number == 1 else number / 2)])
                writer.flush()
    _, out, _ = run("list", tmp_path, "--limit", 5)
    shown = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert [name if "/" in name else f"0/{name}" for name in shown] == ["0/2", "1/2", "0/1", "1/1", "0/0"]
    assert out.splitlines()[-1] == "5 of 6 trajectories; --limit 0 shows all"
    for way in ("asc", "desc"):
        rows = run.json("list", tmp_path, "--sort", f"round(outcome, 1) {way}, trajectory_id")
        assert [row["task"] for row in rows[-2:]] == ["t1", "t1"]


def test_an_empty_store_is_said_to_be_empty(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with writer_to(tmp_path / "store"):
        pass
    for words, answer in ((["list"], []), (["query", "select count(*) as n from trajectories"], [{"n": 0}])):
        caplog.clear()
        code, out, _ = run(words[0], tmp_path / "store", *words[1:], "--json")
        assert (code, json.loads(out)) == (0, answer)
        assert "store: there are no trajectories" in caplog.text


def test_query_answers_about_a_pin_and_times(run: Run, store: Path) -> None:
    text = "select task, count(*) as n, avg(outcome) as mean from trajectories group by task order by task"
    answer = run.json("query", store, text, "--pin", "before")
    assert answer == [{"task": "t0", "n": 4, "mean": 0.5}, {"task": "t1", "n": 4, "mean": 0.25}]
    days = "select cast(committed as date) as day, cast('01:02:03' as time) as hour, count(*) as n from trajectories"
    answer = run.json("query", store, f"{days} group by day, hour")
    assert [(len(row["day"]), row["hour"], row["n"]) for row in answer] == [(10, "01:02:03", 9)]
    rows = run.json("query", store, "select task, committed from trajectories order by trajectory_id")
    assert [row["task"] for row in rows[:2]] == ["t0", "t1"]
    assert all(row["committed"].startswith("20") for row in rows)


def test_query_answers_about_messages_and_tokens(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = 'tab\there, "quoted"\r\nnext\u2028line'
    with writer_to(tmp_path / "store") as buffer:
        buffer.add_trajectories([rollout("odd"), rollout()])
        messages = [{"role": "user", "content": odd}, {"role": "tool", "content": "y" * 300}]
        buffer.add_trajectories([AgentTrajectory(messages=messages, input_ids=torch.arange(2), task_id="odd")])
        buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(2), metadata={"source": {"name": "web"}})])
    where = ("--where", "metadata.source.name = 'web'", "--columns", "trajectory_id,metadata.source.name")
    assert run.json("list", tmp_path / "store", *where) == [{"trajectory_id": 3, "metadata.source.name": "web"}]
    caplog.clear()
    run.out("list", tmp_path / "store", "--columns", "task,metadata.nosuch", "--limit", 1)
    run.out("prune", tmp_path / "store", "--where", "metadata.nosuch = 1")
    assert caplog.messages == ["metadata.nosuch: none of the 4 rollouts that were read has it"] * 2  # once each
    text = "select role, count(*) as n from messages group by role order by n desc, role"
    _, out, _ = run("query", tmp_path / "store", text)
    assert [line.split() for line in out.splitlines()] == [
        ["role", "n"],
        ["user", "3"],
        ["assistant", "2"],
        ["tool", "1"],
    ]
    text = "select role, content from messages where task = 'odd'"
    assert run.json("query", tmp_path / "store", f"{text} and trajectory_id = 2") == messages
    _, out, _ = run("query", tmp_path / "store", f"{text} and role = 'tool'")
    assert f"{'y' * 100} ... (200 more characters)" in out
    text = "select sum(loss_mask) as n, count(old_log_probs) as scored from tokens where task = 't1'"
    assert run.json("query", tmp_path / "store", text) == [{"n": None, "scored": 4}]
    _, out, _ = run("list", tmp_path / "store", "--facts")
    assert "messages.tool_calls" in out
    assert "metadata.KEY" in out


def test_list_says_which_facts_there_are(run: Run, store: Path) -> None:
    _, out, _ = run("list", store, "--facts")
    assert "outcome" in out
    assert "reward.outcome" in out
    annotate(store, [0], {"anna": 1.0})
    _, out, _ = run("list", store, "--facts")
    assert {"reward_judge", "anna"} <= {line.split()[0] for line in out.splitlines()}
    for unused in (["--facts", "--json"], ["--facts", "--where", "outcome > 0"], ["--sort", " "]):
        assert unused[0] in run.err("list", store, *unused)
