"""``trajstore convert``, compared with the programs that read its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forging import spoil_document
from tests.stores import stored, writer_to
from tests.support.witness import witness
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate
from trajstore._core.files.folders import claimed
from trajstore._core.files.local import LocalDirectory
from trajstore.cli import main
from trajstore.errors import ConfigurationError, StoreLockedError
from trajstore.interop import convert
from trajstore.query.documents import text_of

pl = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(
        messages=[
            {"role": "user", "content": f"do {number}\x1b[2J\u202e"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "ok"}]},
        ],
        input_ids=torch.arange(6) + number,
        loss_mask=torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.bool),
        old_log_probs=torch.tensor([-0.1, float("nan"), -float("inf"), 0.0]).to(torch.bfloat16),
        response_start=2,
        reward=Reward(outcome=float(number % 2), metadata={"judge": 0.5}),
        task_id=f"t{number % 3}",
        policy_version=number,
        metadata={"deep": {"er": [1, None]}},
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout(number) for number in range(5)])
        writer.add_trajectories([witness(3)])
        writer.evict([1])
    return tmp_path / "store"


def test_json_lines_have_what_was_added(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(store), str(tmp_path / "out.jsonl"), "--to", "jsonl"]) == 0
    assert "1 trajectory of steps was left out" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["trajectory_id"] for line in lines] == [0, 2, 3, 4]
    for line in lines:
        expected = rollout(int(line["trajectory_id"]))
        assert expected.input_ids is not None
        assert (line["messages"], line["input_ids"]) == (expected.messages, expected.input_ids.tolist())
        assert line["old_log_probs"][1:] == [None, None, 0.0]  # JSON has neither NaN nor infinity
        assert (line["loss_mask"], line["metadata"]) == ([0, 0, 1, 1, 0, 1], expected.metadata)
        assert line["reward"]["outcome"] == float(int(line["trajectory_id"]) % 2)


def test_parquet_with_values_that_came_late_is_read_by_other_tools(store: Path, tmp_path: Path) -> None:
    """Late values of each kind, also by row; some rollouts lack them, and some tools infer types."""
    datasets = pytest.importorskip("datasets")
    duckdb = pytest.importorskip("duckdb")
    pandas = pytest.importorskip("pandas")
    target, lines = tmp_path / "out", tmp_path / "out.jsonl"
    advantages = [torch.tensor([0.5, float("nan"), -2.0, float("inf")]), torch.zeros(4)]
    with writer_to(store) as writer:
        annotate(writer, [2, 4], {"advantages": advantages, "phase": [torch.full((6,), 1 + 2j), torch.zeros(6) * 1j]})
    annotate(store, 0, {"judge": 0.25, "select": "read", "outcome": 7.0, "reward_style": 3})
    annotate(store, 0, {"judge": 0.75})
    assert main(["convert", str(store), str(target), "--to", "parquet", "--where", "outcome != 1"]) == 0
    table = pl.read_parquet(target)
    assert table["trajectory_id"].to_list() == [0, 2, 4]
    expected = rollout(4)
    assert [json.loads(message["json"]) for message in table["messages"][2]] == expected.messages
    assert table["messages"][2][2]["content"] == '[{"type":"text","text":"ok"}]'
    assert json.loads(table["rest"][2])["metadata"] == expected.metadata
    assert table["old_log_probs"][2].to_list()[2] == -float("inf")
    assert table["notes.judge"].to_list() == [0.75, None, None]
    assert table["notes.select"].to_list() == ["read", None, None]
    assert table["outcome"].to_list() == [7.0, 0.0, 0.0]
    assert not {"notes.outcome", "notes.reward_style"} & set(table.columns)
    assert json.loads(table["rest"][0])["reward"]["metadata"]["style"] == 3
    assert table["notes.advantages"][0] is None
    assert str(table["notes.advantages"][1].to_list()) == "[0.5, nan, -2.0, inf]"
    assert table["notes.phase"][1].to_list() == [[1.0, 2.0]] * 6
    text = f"""select task_id, list_sum("notes.advantages") from '{target}/*.parquet' order by trajectory_id"""
    assert duckdb.sql(text).fetchall()[2] == ("t1", 0.0)
    loaded = datasets.load_dataset("parquet", data_dir=str(target), cache_dir=str(tmp_path / "cache"), split="train")
    assert (loaded["input_ids"][2], loaded["notes.advantages"][2]) == (list(range(4, 10)), [0.0] * 4)
    assert pandas.read_parquet(target)["notes.judge"].isna().tolist() == [False, True, True]
    assert main(["convert", str(store), str(lines), "--to", "jsonl"]) == 0
    notes = [json.loads(line)["notes"] for line in lines.read_text().splitlines()]
    assert notes[0] == {"judge": 0.75, "select": "read"}
    assert notes[1] == {"advantages": [0.5, None, -2.0, None], "phase": [[1.0, 2.0]] * 6}


def test_a_run_whose_ranks_have_values_of_two_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mixed numbers and texts become texts in Parquet; scalars mixed with rows are left out."""
    run, target = tmp_path / "run", tmp_path / "out"
    for rank, given in enumerate((0.5, "good")):
        with writer_to(run / f"rank_{rank}") as writer:
            annotate(writer, writer.add_trajectories([rollout(rank)]), {"judge": given})
    assert main(["convert", str(run), str(target), "--to", "parquet"]) == 0
    assert sorted(pl.read_parquet(target)["notes.judge"]) == ["0.5", "good"]
    with writer_to(run / "rank_0") as first, writer_to(run / "rank_1") as second:
        annotate(first, 0, {"style": 1.0})
        annotate(second, 0, {"style": [torch.zeros(6)]})
    for form in ("jsonl", "parquet"):
        caplog.clear()
        assert main(["convert", str(run), str(tmp_path / form), "--to", form]) == 0
        assert (
            "values style are by row in one rank and one for each trajectory in another, so they are left"
            in caplog.text
        )
    lines = [json.loads(line) for line in (tmp_path / "jsonl").read_text().splitlines()]
    assert sorted(str(line["notes"]) for line in lines) == ["{'judge': '0.5'}", "{'judge': 'good'}"]
    table = pl.read_parquet(tmp_path / "parquet")
    assert sorted(table["notes.judge"]) == ["0.5", "good"]
    assert "notes.style" not in table.columns


def test_what_cannot_be_read_is_named_and_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store"
    for number in range(3):
        stored(path, [rollout(number)], trajectory_format="pkl")
    spoil_document(sorted((path / "shards").iterdir())[1], b'"task_id"')
    assert main(["convert", str(path), str(tmp_path / "out.jsonl"), "--to", "jsonl", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["written"], list(report["problems"])) == (2, ["trajectory 1"])
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_two_conversions_to_one_target_are_not_made_at_once(store: Path, tmp_path: Path) -> None:
    with (
        claimed(LocalDirectory(tmp_path / ".out.converting"), tmp_path / "out"),
        pytest.raises(StoreLockedError, match=r"out is being written by process .*; wait for it"),
    ):
        convert.convert_to(store, tmp_path / "out", "parquet")
    convert.convert_to(store, tmp_path / "out", "parquet")
    with pytest.raises(ConfigurationError, match="exists already"):
        convert.convert_to(store, tmp_path / "out", "parquet")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "words", ["convert STORE OUT --to jsonl", "convert STORE OUT --to parquet", "view STORE --bundle OUT"]
)
def test_a_url_is_refused_with_what_to_do(words: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.replace("STORE", str(store)).replace("OUT", "s3://bucket/out").split()) == 2
    error = capsys.readouterr().err
    assert "s3://bucket/out is a URL" in error
    assert "then copy them there" in error


CHAT = """{% for message in messages %}{{ message.role }}: {{ message.content or "" }}
{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments }}</call>
{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_import_reads_an_export_back(store: Path, tmp_path: Path, form: str) -> None:
    phases = [
        torch.tensor([1 + 2j, complex("nan"), 0, complex("infj"), 0, 1], dtype=torch.complex64),
        torch.zeros(6) * 1j,
    ]
    with writer_to(store) as writer:
        annotate(writer, [2, 4], {"phase": phases, "adv": [torch.tensor([0.5, float("nan"), -2, float("-inf")])] * 2})
        annotate(writer, [0, 3], {"judge": [0.25, 0.5], "select": "read", "outcome": 7.0, "reward_style": 3})
        annotate(writer, 0, {"judge": None})
    to, back = ["convert", store, tmp_path / "out", "--to", form], [tmp_path / "out", tmp_path / "made", "--from", form]
    for words in (to, ["convert", *back]):
        assert main(list(map(str, words))) == 0
    with TrajectoryReplayBuffer.open(store) as first, TrajectoryReplayBuffer.open(tmp_path / "made") as second:
        for number, made in zip((0, 2, 3, 4), second.trajectory_ids.tolist(), strict=True):
            assert same(vars(first.get(number)), vars(second.get(made)))
        names = ("task", "outcome", "judge", "select", "reward_style", "reward_judge", "turns", "version_high")
        wanted = first.query().where("kind = 'agent'").order_by("trajectory_id").select(*names).rows()
        assert second.query().order_by("trajectory_id").select(*names).rows() == wanted
    assert main(["convert", str(tmp_path / "made"), str(tmp_path / "again"), "--to", form]) == 0
    assert main(["convert", str(tmp_path / "again"), str(tmp_path / "made"), "--from", form]) == 2, "it exists"


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, with NaN equal to itself."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and str(one.tolist()) == str(other.tolist())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def test_chat_templates_see_tool_calls_of_parquet(store: Path, tmp_path: Path) -> None:
    datasets, jinja = pytest.importorskip("datasets"), pytest.importorskip("jinja2")
    assert main(["convert", str(store), str(tmp_path / "out"), "--to", "parquet"]) == 0
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "c"), split="train"
    )
    text = jinja.Template(CHAT).render(messages=loaded[0]["messages"])
    assert text.count("<call>f {}</call>") == 1
    assert text == jinja.Template(CHAT).render(
        messages=[{**m, "content": text_of(m.get("content"))} for m in rollout(0).messages]
    )


BAD = {
    "{": "is not JSON",
    "[1]": "is not a JSON object",
    '{"tokens": [1]}': "'tokens' is not a field of a rollout; put it in metadata",
    '{"input_ids": [1, null]}': "is not a rollout: ValueError('null in place of a number')",
    '{"input_ids": [1.5]}': "is not a rollout",
    '{"task_id": 7}': "field task_id: 7 is a int",
    '{"input_ids": [5, 6': "is not JSON",  # a truncated file
}


def test_damaged_lines_are_named_and_hide_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, words = tmp_path / "in.jsonl", ["--from", "jsonl"]
    source.write_text('{"input_ids": [1]}\n' + "\n".join(f"{line}" for line in BAD))
    assert main(["convert", str(source), str(tmp_path / "out"), *words]) == 1
    out = capsys.readouterr().out
    for number, message in enumerate(BAD.values(), start=2):
        assert f"in.jsonl: line {number} was left out: {message}" in out
    with TrajectoryReplayBuffer.open(tmp_path / "out") as reader:
        assert [reader.get(number).input_ids.tolist() for number in reader.trajectory_ids.tolist()] == [[1]]
    for text, message in (
        ("", "has no rollouts"),
        ("{", "nothing could be converted: line 1 was left out: is not JSON"),
    ):
        source.write_text(text)
        assert main(["convert", str(source), str(tmp_path / "none"), *words]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


@pytest.mark.parametrize(("name", "target"), [("chat", "out.jsonl"), ("trl", "out")])
def test_a_message_without_a_role_leaves_out_its_rollout_alone(tmp_path: Path, name: str, target: str) -> None:
    odd = AgentTrajectory(messages=[{"content": "hm"}], reward=Reward(outcome=1))
    stored(tmp_path / "store", [rollout(0), odd, rollout(1)])
    done = convert.convert_to(tmp_path / "store", tmp_path / target, name)
    assert (done.written, list(done.problems)) == (2, ["trajectory 1"])
