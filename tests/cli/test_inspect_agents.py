"""``trajstore inspect`` of agent rollouts and experience pools."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.stores import Run
from tests.replay.conftest import build
from tests.stores import reader_of, stored
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trajstore import AgentTrajectory, TrajectoryReplayBuffer, annotate
from trajstore.errors import SchemaMismatchError
from trajstore.operations.inspect import inspect
from trajstore.trajectory import Reward

HOSTILE = "look\x1b[2J\x1b]0;owned\x07 \u202ehere\x9b\n  at a glance: all files there"


def test_agent_trajectories(run: Run, tmp_path: Path) -> None:
    path = stored(tmp_path / "agents", [build(f"task_{n}", n, float(n % 2), policy_version=n) for n in range(4)])
    report = inspect(path)
    assert report["agents"] == {
        "rollouts": 4,
        "tasks": 4,
        "sessions": 0,
        "without_task": 0,
        "outcomes": {"min": 0.0, "mean": 0.5, "max": 1.0},
        "without_outcome": 0,
        "turns": {"min": 1, "mean": 1.0, "max": 1},
        "with_messages": 4,
    }
    assert report["policy"]["ages"]["max"] == 3
    annotate(path, 1, {"outcome": 0.0})
    assert inspect(path)["agents"]["outcomes"] == {"min": 0.0, "mean": 0.25, "max": 1.0}
    assert "  | go\n" in run.out("inspect", path, "--trajectory", 1)


def agent_store(path: Path, count: int = 4, **more: object) -> Path:
    """Write rollouts of ten tokens: a prompt of four, and two turns of two with an answer in between."""
    written = torch.tensor([1, 1, 0, 0, 1, 1])
    values: dict[str, object] = {
        "messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "x" * 5000}],
        "input_ids": torch.arange(10),
        "loss_mask": torch.cat([torch.zeros(4, dtype=torch.int64), written]),
        "response_mask": written,
        "old_log_probs": torch.arange(6) / -8,
        "response_start": 4,
        "reward": Reward(outcome=1.0, success_rate=0.5, description="exact", metadata={"format": 0.25}),
        "data_id": "row_7",
        "metadata": {"engine": "vllm\x1b[31m"},
        "is_terminated": True,
    }
    stored(
        path, [AgentTrajectory(task_id=f"task_{n % 2}", policy_version=40 + n, **(values | more)) for n in range(count)]
    )
    return path


def test_agents_are_told_in_words_of_agents(run: Run, tmp_path: Path) -> None:
    figure_of = figures(run.out("inspect", agent_store(tmp_path / "agents", messages=[])))
    assert (figure_of["agents rollouts"], figure_of["tokens per rollout"]) == ("4", "10")
    assert not {"batch", "steps", "agents turns"} & {*figure_of}
    assert run.json("inspect", tmp_path / "agents", "--trajectory", 0)["turns"] == 2, "by runs of the model's tokens"
    report = inspect(tmp_path / "agents")
    assert report["tokens"] == {"min": 10, "mean": 10.0, "max": 10}
    assert report["response_tokens"]["max"] == 6
    assert report["steps"] is report["batch"] is None


def test_lengths_are_of_the_rollouts_that_tell_theirs(tmp_path: Path) -> None:
    """Rollouts without log-probs use ``response_start``; message-only rollouts have no length."""
    mask = torch.tensor([0, 0, 1, 1, 1])
    tokens = AgentTrajectory(input_ids=torch.arange(5), loss_mask=mask, response_start=2)
    rated = dataclasses.replace(tokens, old_log_probs=-torch.ones(3))
    longer = AgentTrajectory(input_ids=torch.arange(11), loss_mask=torch.ones(11, dtype=torch.int64), response_start=2)
    stored(tmp_path / "store", [tokens, rated, longer, AgentTrajectory(messages=[{"role": "user", "content": "?"}])])
    report = inspect(tmp_path / "store")
    assert report["tokens"] == {"min": 5, "mean": 7.0, "max": 11}
    assert report["response_tokens"] == {"min": 3, "mean": 5.0, "max": 9}
    json.dumps(report)


def figures(out: str) -> dict[str, str]:
    pairs = [re.split(r"  +", line.strip(), maxsplit=1) for line in out.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_a_pools_store_is_told_as_a_pool(run: Run, tmp_path: Path) -> None:
    store = BufferStore.open(tmp_path / "pool")
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=2), store=store)
    for number in range(4):
        made = [build(task, number, 1.0, entropy=1 - number / 10, policy_version=number) for task in "ab"]
        manager.admit([*made, build("a", 10, 0.0), build("b", 10, 0.0), build("c", 1, 1.0), build("c", 2, 1.0)])
    store.close()
    report = inspect(tmp_path / "pool")
    assert (report["kind"], report["trajectories"]) == ("store", 4)
    assert report["pool"] == {
        "trajectories": 4,
        "tasks": 2,
        "demonstrations": 0,
        "difficulties": {"2": 2},
        "skipped_tasks": 1,
        "others": 0,
        "recorded": False,
    }
    assert (report["agents"]["rollouts"], report["agents"]["tasks"]) == (4, 2)
    assert report["policy"]["versions"] == {"min": 2, "max": 3}
    code, out, _ = run("inspect", tmp_path / "pool")
    figure_of = figures(out)
    assert code == 0
    assert f"{tmp_path / 'pool'}: experience pool" in out
    names = ("pool trajectories", "pool tasks", "pool difficulties 2", "pool skipped tasks", "agents outcomes")
    assert [figure_of[name] for name in names] == ["4", "2", "2", "1", "1"]


@pytest.mark.parametrize("name", ["step", "global_step"])
def test_checkpoints_of_one_store_are_not_added_up(name: str, run: Run, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        for step in (9, 10):
            buffer.add_trajectories([build("a", step)])
            buffer.save_checkpoint(tmp_path / "checkpoints" / f"{name}_{step}")
    report = inspect(tmp_path / "checkpoints")
    assert (report["trajectories"], report["agents"]["rollouts"], report["earlier_states"]) == (2, 2, 1)


def test_rollouts_that_name_no_task_are_no_task(run: Run, tmp_path: Path) -> None:
    for part, tasks in (("rank_0", ["a", "b", "", ""]), ("rank_1", ["a"])):
        stored(tmp_path / "run" / part, [build(task, number) for number, task in enumerate(tasks)])
    report = inspect(tmp_path / "run" / "rank_0")
    assert (report["agents"]["tasks"], report["agents"]["without_task"]) == (2, 2)
    _, out, _ = run("inspect", tmp_path / "run")
    assert f"{tmp_path / 'run'}: run directory" in out
    report = inspect(tmp_path / "run")
    assert (report["agents"]["tasks"], report["agents"]["without_task"]) == (2, 2)


def test_one_rollout_is_shown_whole_and_nothing_of_it_reaches_the_terminal(run: Run, tmp_path: Path) -> None:
    path = agent_store(tmp_path / "agents")
    out = run.out("inspect", path, "--trajectory", 1)
    for text in ("task_1", "row_7", "exact", "format", "0.25", "41", "engine", "model            4"):
        assert text in out
    assert "3,000 more characters" in out
    assert all(character.isprintable() or character == "\n" for character in out)
    for expected in ("\\x1b[2J", "\\u202e", "\n  | "):
        assert expected in out
    assert "\n  at a glance" not in out, "no message passes for a line of the report"
    out = run.out("inspect", path, "--trajectory", 1, "--json")
    assert all(character.isprintable() or character == "\n" for character in out)
    report = json.loads(out)
    assert report["messages"][0]["content"] == HOSTILE
    assert len(report["messages"][1]["content"]) == 5000
    assert report["reward"]["metadata"] == {"format": 0.25}
    assert [part["part"] for part in report["token_parts"]] == ["prompt", "model", "observation", "model"]


def test_calls_images_and_long_texts_of_messages(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c", "function": {"name": "bash", "arguments": '{"cmd": "ls \\u001b[2J", "n": 2}'}}
    odd = {"function": {"name": "f", "arguments": "{not JSON"}}
    link = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 400}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, link]},
        {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        {"role": "tool", "tool_call_id": "c", "content": "\n".join(map(str, range(300)))},
    ]
    path = agent_store(tmp_path / "agents", messages=messages, metadata={"note": "z" * 300})
    out = run.out("inspect", path, "--trajectory", 0)
    for text in ("  | see\n  | [image/png, 300 B]\n", '  | bash(cmd="ls \\u001b[2J", n=2)\n  | f({not JSON)\n'):
        assert text in out
    assert "message 2, tool, result of bash:\n  | 0\n" in out
    assert "  | 19\n  (280 more lines, 1,040 more characters; --full shows all)\n" in out
    assert "None" not in out
    full = run.out("inspect", path, "--trajectory", 0, "--full")
    assert "  | 299\n" in full
    assert f"  note\n  | {'z' * 300}\n" in full
    assert "--full needs --trajectory" in run.err("inspect", path, "--full")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = run.out("inspect", path, "--trajectory", 0, "--full").splitlines()
    assert max(len(line) for line in lines if "|" in line) == 80
    assert "  | 299" in lines


def test_calls_and_results_in_other_forms(run: Run, tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 400}}
    result = {
        "type": "tool_result",
        "tool_use_id": "u",
        "is_error": True,
        "content": [image, {"type": "text", "text": "no"}],
    }
    called = {"id": "c", "function": "python", "arguments": {"code": "1+1"}, "parse_error": "odd", "type": "function"}
    messages = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "u", "name": "bash", "input": {"cmd": "ls"}}]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "tool_calls": [called, {"name": "older", "args": {"a": 1}}]},
    ]
    out = run.out("inspect", agent_store(tmp_path / "agents", messages=messages), "--trajectory", 0)
    assert "  | result of bash (is_error=True):\n  | [image/png, 300 B]\n  | no\n" in out
    assert '  | python(code="1+1") {"parse_error": "odd"}\n  | older(a=1)\n' in out


def test_tokens_and_values_that_came_late_of_a_rollout_of_a_run(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "run" / f"rank_{rank}") as buffer:
            buffer.add_trajectories(
                [
                    AgentTrajectory(
                        input_ids=torch.arange(5) + 10 * rank,
                        response_start=2,
                        loss_mask=torch.tensor([0, 0, 1, 0, 1]),
                        old_log_probs=torch.tensor([-0.5, -1.0, -0.25]),
                    )
                ]
            )
            annotate(buffer, 0, {"judge": rank, "tag": HOSTILE}, who="anna")
            buffer.add_trajectories([AgentTrajectory(messages=[{"role": "user", "content": "go"}])])
    report = run.json("inspect", tmp_path / "run", "--trajectory", "1/0")
    assert [part["part"] for part in report["token_parts"]] == ["prompt", "model", "observation", "model"]
    assert [(note["name"], note["value"], note["who"]) for note in report["notes"]] == [
        ("judge", 1.0, "anna"),
        ("tag", HOSTILE, "anna"),
    ]
    out = run.out("inspect", tmp_path / "run", "--trajectory", "1/0")
    assert "judge 1 anna" in " ".join(out.split())
    assert "\x1b" not in out


def test_tokens_as_text(run: Run, tmp_path: Path, of_numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = agent_store(tmp_path / "agents", metadata={"tokenizer": str(tmp_path)})
    assert "<4\\x1b><5\\x1b>" in run.out("inspect", path, "--trajectory", 0)
    (path.parent / "other").mkdir()
    assert "<4" in run.out("inspect", path, "--trajectory", 0, "--tokenizer", path.parent / "other")
    assert "tokenizer: absent: no such folder" in run.err("inspect", path, "--trajectory", 0, "--tokenizer", "absent")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("inspect", path, "--trajectory", 0)[0] == 0, "the named tokenizer is used only if it exists"
    assert "pip install '/path/to/trajstore[demo]'" in run.err("inspect", path, "--trajectory", 0, "--tokenizer", "x")


def test_steps_cannot_be_drawn_of_agents(tmp_path: Path) -> None:
    path = agent_store(tmp_path / "agents")
    buffer = reader_of(path)
    for columns in (None, ["input_ids"]):
        with pytest.raises(SchemaMismatchError, match=r"sample_trajectories\(count\)"):
            buffer.sample(2, columns=columns)
    assert len(buffer.sample_trajectories(2)) == 2
