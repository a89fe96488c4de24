"""Each format of ``trajstore convert``: what it loses is what it declares, and all else comes back."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stores import stored, writer_to
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate
from trajstore.cli import command, main
from trajstore.interop.convert import FORMATS, convert_from, convert_to, differences, format_named
from trajstore.trajectory import AnyTrajectory

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")

CONVERSATIONS = ["chat", "trl", "verl"]


def full_rollout(number: int = 0) -> AgentTrajectory:
    """Return a rollout with a value in every field."""
    return AgentTrajectory(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "7 + 5?\x00\u202e"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "12", "tool_call_id": "x"},
            {"role": "assistant", "content": "12", "reasoning_content": "easy", "author": "llm"},
        ],
        input_ids=torch.arange(6, dtype=torch.int32),
        attention_mask=torch.ones(6, dtype=torch.uint8),
        loss_mask=torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.bool),
        response_start=2,
        old_log_probs=torch.tensor([-0.1, float("nan"), -float("inf"), 0.0]),
        rollout_log_probs=torch.tensor([-0.1, -0.2, -0.3, 0.0], dtype=torch.bfloat16),
        entropys=torch.ones(4),
        response_mask=torch.ones(4, dtype=torch.int64),
        reward=Reward(outcome=0.5, success_rate=0.25, description="half", metadata={"judge": 1}),
        task_id=f"gsm8k:{number}",
        data_id="d",
        rollout_id="r/0",
        query="7 + 5?",
        is_terminated=True,
        policy_version=3,
        entropy=0.5,
        tokenizer_fingerprint="f",
        metadata={"tools": [{"type": "function"}], "ground_truth": "12", "deep": {"er": [1, None]}},
    )


def read_all(path: Path) -> list[AnyTrajectory]:
    with TrajectoryReplayBuffer.open(path) as reader:
        return [reader.get(number) for number in reader.trajectory_ids.tolist()]


def names_of(trajectory: AnyTrajectory) -> set[str]:
    return {item.name for item in fields(trajectory)}


def test_the_command_line_has_all_formats() -> None:
    assert command.FOREIGN == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_loses_what_it_declares(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path / "store", [full_rollout()])
    with writer_to(path) as writer:
        annotate(writer, 0, {"judge": 0.5, "advantages": [torch.ones(4)]})
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", name, "--check"]) == 0
    cannot_carry = format_named(name).cannot_carry
    said = f"{name} has no place for it: {', '.join(cannot_carry)}\n" if cannot_carry else ""
    assert capsys.readouterr().out.endswith(f"{said}{tmp_path / 'out'}: 1 rollout, 1 compared\n")
    done = convert_from(tmp_path / "out", tmp_path / "back", name, check=True)
    assert (done.written, done.checked, done.is_whole) == (1, 1, True)
    (first,), (second,) = read_all(path), read_all(tmp_path / "back")
    lost = {field for field in cannot_carry for at in differences(first, second) if f"{at}.".startswith(f"{field}.")}
    assert (differences(first, second, cannot_carry), lost) == ([], set(cannot_carry))


TEXTS = st.text(max_size=20).filter(lambda text: text.encode("utf8", "ignore").decode() == text)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": JSON},
    optional={"tool_calls": JSON, "name": TEXTS},
)
ROLLOUTS = st.builds(
    AgentTrajectory,
    messages=st.lists(MESSAGES, min_size=1, max_size=3),
    reward=st.none() | st.builds(Reward, outcome=st.floats(-1, 1)),
    task_id=TEXTS,
    rollout_id=TEXTS,
    query=TEXTS,
    metadata=st.dictionaries(TEXTS | st.sampled_from(["tools", "ability"]), JSON, max_size=2),
)


@pytest.mark.parametrize("name", ["jsonl", *CONVERSATIONS])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollouts=st.lists(ROLLOUTS, min_size=1, max_size=8))
def test_any_rollout_comes_back(
    name: str, rollouts: list[AgentTrajectory], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(name)
    path = stored(folder / "store", rollouts)
    assert convert_to(path, folder / "out", name, check=True).checked == len(rollouts)
    convert_from(folder / "out", folder / "back", name)
    for first, second in zip(read_all(path), read_all(folder / "back"), strict=True):
        assert differences(first, second) == []


def test_conversations_of_other_programs_become_rollouts(tmp_path: Path) -> None:
    """Files as these programs write them, with columns of their own and rows that are damaged."""
    datasets = pytest.importorskip("datasets")
    question = {"role": "user", "content": "7 + 5?"}
    answer = {"role": "assistant", "content": "12"}
    lines = [{"messages": [question, answer], "split": "train"}, {"messages": []}, {"messages": [{"content": "x"}]}]
    (tmp_path / "chat").write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)))
    rows: dict[str, list[dict[str, Any]]] = {
        "trl": [
            {"prompt": "7 + 5?", "completion": "12", "reward": 1.0, "difficulty": 3},
            {"prompt": None, "completion": None, "reward": 1.0, "difficulty": 3},
        ],
        "verl": [
            {
                "data_source": "gsm8k",
                "prompt": [question],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "12"},
                "extra_info": {"index": 7, "split": "train"},
            }
        ],
    }
    datasets.Dataset.from_list(rows["trl"]).save_to_disk(str(tmp_path / "trl"))
    datasets.Dataset.from_list(rows["verl"]).to_parquet(str(tmp_path / "verl"))
    made = {}
    for name, problems in (("chat", ["line 3", "line 5"]), ("trl", ["data-00000-of-00001.arrow: row 1"]), ("verl", [])):
        done = convert_from(tmp_path / name, tmp_path / f"{name}-store", name, check=True)
        assert list(done.problems) == problems
        (made[name],) = read_all(tmp_path / f"{name}-store")
    assert (made["chat"].messages, made["chat"].metadata) == ([question, answer], {"split": "train"})
    assert (made["trl"].messages, made["trl"].metadata) == ([question, answer], {"difficulty": 3})
    assert made["trl"].reward == Reward(outcome=1.0)
    assert (made["verl"].messages, made["verl"].task_id) == ([question], "gsm8k:7")
    assert made["verl"].metadata == {"ability": "math", "ground_truth": "12", "split": "train"}


def test_written_conversations_are_read_by_other_programs(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = stored(tmp_path / "store", [full_rollout(number) for number in range(3)])
    load = partial(datasets.load_dataset, split="train", cache_dir=str(tmp_path / "cache"))
    for name in CONVERSATIONS:
        convert_to(path, tmp_path / name, name)
    chat = [json.loads(line) for line in (tmp_path / "chat").read_text().splitlines()]
    assert chat[2]["messages"] == full_rollout().messages
    assert (chat[2]["tools"], chat[2]["task_id"], chat[2]["reward"]) == ([{"type": "function"}], "gsm8k:2", 0.5)
    row = load("parquet", data_dir=str(tmp_path / "trl"))[1]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["completion"][0]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    row = load("parquet", data_dir=str(tmp_path / "verl"))[1]
    assert (row["data_source"], row["extra_info"]["index"], row["reward_model"]["ground_truth"]) == ("gsm8k", "1", "12")
