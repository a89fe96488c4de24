"""Preferences for TRL: which rollouts become pairs, and what the files have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stores import stored
from trajstore import AgentTrajectory, Reward, annotate
from trajstore.cli import main
from trajstore.errors import ConfigurationError
from trajstore.interop.convert import convert_from, convert_to

pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
pytest.importorskip("pyarrow", reason="needs the extra 'convert'")

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}
PIXELS = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
LINK = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}

Messages = list[dict[str, Any]]


def chat(question: Any, answer: str, *between: dict[str, Any], system: str = "") -> Messages:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}, *between, {"role": "assistant", "content": answer}]


def made(path: Path, *rollouts: tuple[str, Messages, float | None], **metadata: Any) -> Path:
    rewards = [None if outcome is None else Reward(outcome=outcome) for _, _, outcome in rollouts]
    return stored(
        path,
        [
            AgentTrajectory(task_id=task, messages=messages, reward=reward, metadata=metadata)
            for (task, messages, _), reward in zip(rollouts, rewards, strict=True)
        ],
    )


def test_pairs_are_the_best_and_the_worst_of_a_task_and_prompt(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "a"}
    store = made(
        tmp_path / "store",
        *[("sort", chat("q", answer), outcome) for answer, outcome in (("a", 0.5), ("b", 0.0), ("c", 1.0), ("d", 0.0))],
        *[("tie", chat("q", answer), 1.0) for answer in "ab"],
        *[("system", chat("q", answer, system=answer), outcome) for answer, outcome in (("a", 0.0), ("b", 1.0))],
        *[("same", chat("q", "a"), outcome) for outcome in (0.0, 1.0)],
        *[("tools", chat("q", answer, *called), outcome) for answer, outcome in (("a", 0.0), ("b", 1.0))],
        *[("unknown", chat("q", answer), outcome) for answer, outcome in (("a", None), ("b", 1.0))],
        *[("", messages, 1.0) for messages in ([], [{"role": "user", "content": "q"}], chat("q", "x")[1:])],
        *[("late", chat("q", answer), 1.0) for answer in "ab"],
        tools=TOOLS,
    )
    annotate(store, 17, {"outcome": 0.0})
    done = convert_to(store, tmp_path / "pairs", "dpo")
    assert (done.written, done.problems, done.left_out) == (3, {}, 0)
    assert done.not_chosen == {
        "without an outcome": 1,
        "without a prompt or without an answer of the model": 3,
        "neither the best nor the worst of its task and prompt": 2,
        "of the same outcome as all others of its task and prompt": 2,
        "alone with its task and prompt": 3,
        "of tasks whose best and worst answers are the same": 2,
    }
    first, tools, late = pl.read_parquet(tmp_path / "pairs").to_dicts()
    assert [message["content"] for message in first["prompt"]] == ["q"]
    assert [first[name][0]["content"] for name in ("chosen", "rejected")] == ["c", "d"]  # of equal ones the newest
    assert (first["task_id"], first["chosen_id"], first["rejected_id"], first["rejected_outcome"]) == (
        "sort",
        "2",
        "3",
        0,
    )
    assert json.loads(tools["tools"]) == TOOLS
    assert tools["chosen"][0]["tool_calls"] == [CALL]
    assert [message["content"] for message in tools["chosen"]] == [None, "a", "b"]
    assert (late["chosen_id"], late["rejected_id"]) == ("18", "17")


def test_single_preferences_are_labelled_by_their_outcome(tmp_path: Path) -> None:
    outcomes = (0.0, 0.5, 0.51, 1.0, None)
    store = made(tmp_path / "store", *[(str(at), chat("q", "a"), outcome) for at, outcome in enumerate(outcomes)])
    done = convert_to(store, tmp_path / "out", "kto")
    assert (done.written, done.not_chosen) == (4, {"without an outcome": 1})
    rows = pl.read_parquet(tmp_path / "out")
    assert (rows["label"].to_list(), rows["trajectory_id"].to_list()) == ([False, False, True, True], [*"0123"])
    assert rows["completion"][0].to_list()[0]["content"] == "a"


@pytest.mark.parametrize(("form", "written"), [("dpo", 1), ("kto", 2), ("trl", 5)])
def test_contents_that_are_no_texts_are_named(
    tmp_path: Path, form: str, written: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["what ", {"type": "text", "text": "is it?"}]
    store = made(
        tmp_path / "store",
        *[("a", chat(texts, answer), outcome) for answer, outcome in (("cat", 1.0), ("dog", 0.0))],
        *[("b", chat([*texts, PIXELS], answer), outcome) for answer, outcome in (("a", 1.0), ("b", 0.0))],
        ("c", chat("q", "a", {"role": "user", "content": [LINK]}), 1.0),
    )
    done = convert_to(store, tmp_path / "out", form)
    problem = "has an image or another part that is no text; chat has it"
    problems = {f"trajectory {at}": f"messages[{at // 4}]: {problem}" for at in (2, 3, 4)}
    assert (done.written, done.problems) == (written, {} if form == "trl" else problems)
    assert ("are JSON texts" in caplog.text) == (form == "trl")
    rows = {row["task_id"]: row for row in pl.read_parquet(tmp_path / "out").to_dicts()}
    assert rows["a"]["prompt"][0]["content"] == "what is it?"
    if form == "trl":
        assert json.loads(rows["b"]["prompt"][0]["content"]) == [*texts, PIXELS]


ANTHROPICS = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "look"},
            {"type": "tool_use", "id": "c", "name": "run", "input": {"cmd": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "is_error": True,
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                ],
            },
            {"type": "text", "text": "go on"},
        ],
    },
]
RESPONSES = [
    {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "run", "arguments": '{"cmd":"ls"}'},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
    {"type": "web_search_call", "id": "w"},
    {"role": "user", "content": "go on"},
]
INSPECTS = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "look"}],
        "tool_calls": [{"id": "c", "type": "function", "function": "run", "arguments": {"cmd": "ls"}}],
    },
    {"role": "tool", "function": "run", "tool_call_id": "c", "content": "a"},
    {"role": "user", "content": "go on"},
]
THOUGHTS = {"thoughts of the model left out": 1}


@pytest.mark.parametrize(
    ("messages", "changed"),
    [
        (ANTHROPICS, {"images in results of tools left out": 1, "marks of failed results (is_error) left out": 1}),
        (RESPONSES, {"items of type 'web_search_call' left out": 1}),
        (INSPECTS, {}),
    ],
)
def test_other_forms_of_conversations_become_openais(
    tmp_path: Path, messages: Messages, changed: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"name": "run", "input_schema": {"type": "object"}}]
    ends = [{"role": "assistant", "content": [{"type": "text", "text": text}]} for text in ("good", "bad")]
    store = made(
        tmp_path / "store",
        *[("a", [*messages, end], outcome) for end, outcome in zip(ends, (1.0, 0.0), strict=True)],
        tools=tools,
    )
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"cmd":"ls"}'}}
    plain = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a"},
        {"role": "user", "content": "go on"},
    ]

    def known(message: dict[str, Any]) -> dict[str, Any]:
        names = ("role", "content", "tool_calls", "tool_call_id")
        return {name: message[name] for name in names if message.get(name) is not None}

    done = convert_to(store, tmp_path / "chat", "chat")
    assert (done.written, done.problems) == (2, {})
    counted = {what: count for what, count in done.changed.items() if "OpenAI" not in what}
    assert counted == {what: 2 * count for what, count in (changed | THOUGHTS).items()}
    line = json.loads((tmp_path / "chat").read_text().splitlines()[0])
    assert [known(message) for message in line["messages"][:-1]] == plain
    assert line["tools"] == TOOLS
    for form in ("trl", "dpo", "kto", "verl"):
        done = convert_to(store, tmp_path / form, form)
        assert (done.problems, done.not_chosen) == ({}, {})
        assert THOUGHTS.keys().isdisjoint(done.changed)
        row = pl.read_parquet(tmp_path / form).to_dicts()[0]
        if form != "verl":
            row["messages"] = row["prompt"] + row.get("chosen", row.get("completion"))
        assert [known(message) for message in row["messages"][:-1]] == plain
        assert row["messages"][1]["reasoning_content"] == "hm"
    assert main(["convert", str(store), str(tmp_path / "told"), "--to", "chat"]) == 0
    assert f"{store}: thoughts of the model left out: 2\n" in capsys.readouterr().out


def test_a_store_without_pairs_and_files_that_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = made(tmp_path / "store", ("a", chat("q", "a"), 1.0), ("b", chat("q", "b"), 0.0))
    with pytest.raises(ConfigurationError, match="no pairs: 2 alone with its task and prompt"):
        convert_to(store, tmp_path / "out", "dpo")
    with pytest.raises(ConfigurationError, match="of 2 trajectories, none match"):
        convert_to(store, tmp_path / "out", "dpo", where="outcome > 1")
    assert main(["convert", str(store), str(tmp_path / "out"), "--to", "kto"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 2 rollouts\n"
    with pytest.raises(ConfigurationError, match="kto can only be written"):
        convert_from(tmp_path / "out", tmp_path / "back", "kto")
