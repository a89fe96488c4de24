"""Each format of ``trajstore convert`` loses exactly the fields that it declares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stores import stored, writer_to
from tests.support.equality import same
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore.cli import command, main
from trajstore.errors import ConfigurationError, StoreNotFoundError
from trajstore.interop import convert
from trajstore.interop.convert import FORMATS, convert_from, convert_to, format_named
from trajstore.trajectory import AnyTrajectory

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")

ODD = ["lr=[1]", "a*b", "run?", "x{0,1}", "50% off", "a b,c", "#1", "~x", "é\u202e", "a'b\"c"]
"""Names that are patterns or separators elsewhere."""

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


def full_episode() -> Trajectory:
    """Return an episode of three steps with a value in every field."""
    deep = {"x": torch.rand(4, 1, 2), "level": torch.rand(4, 1)}
    image = torch.randint(0, 255, (4, 1, 2, 3), dtype=torch.uint8)
    return Trajectory(
        max_episode_length=9,
        model_weights_id="w",
        actions=torch.rand(3, 1, 2),
        intervene_flags=torch.zeros(3, 1, 2, dtype=torch.bool),
        rewards=torch.tensor([0.0, float("nan"), 1.0])[:, None, None],
        terminations=torch.tensor([False, False, True])[:, None, None],
        truncations=torch.zeros(3, 1, 1, dtype=torch.bool),
        dones=torch.tensor([False, False, True])[:, None, None],
        prev_logprobs=torch.rand(3, 1, 2),
        prev_values=torch.rand(4, 1, 1),
        versions=torch.ones(3, 1, 1),
        forward_inputs={"noise": torch.rand(3, 1, 2), "with": {"reset": torch.rand(4, 1, 2)}},
        curr_obs={"image": image[:-1], "deep": {name: rows[:-1] for name, rows in deep.items()}},
        next_obs={"image": image[1:], "deep": {name: rows[1:] for name, rows in deep.items()}},
    )


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a trajectory that are not empty, with their dotted names."""
    if is_dataclass(value) or isinstance(value, dict):
        for key, item in (value if isinstance(value, dict) else vars(value)).items():
            inner = f"{name}.{key}".lstrip(".")
            is_late = inner in ("notes", "metadata.trajstore.notes", "metadata.trajstore.recorded")
            yield from leaves(item, "late values" if is_late else inner)
    elif isinstance(value, torch.Tensor) or value not in (None, "", []):
        yield name, value


def read_all(path: Path) -> list[AnyTrajectory]:
    with TrajectoryReplayBuffer.open(path) as reader:
        return [reader.get(number) for number in reader.trajectory_ids.tolist()]


def test_the_command_line_has_all_formats() -> None:
    assert command.FOREIGN == FORMATS


@pytest.mark.parametrize("name", [name for name in FORMATS if format_named(name).read])
def test_a_format_loses_what_it_declares(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the disk is full or Ctrl-C comes after the files were completed, and the conversion is run again."""
    of_steps = format_named(name).kind == "episodes"
    path = stored(tmp_path / "store", [full_episode() if of_steps else full_rollout()])
    with writer_to(path) as writer:
        annotate(writer, 0, {"advantages": [torch.ones(3, 1) if of_steps else torch.ones(4)]})
        if not of_steps:
            annotate(writer, 0, {"judge": 0.5})
    words = ["convert", str(path), str(tmp_path / "out"), "--to", name]
    for error, code, advice in (
        (OSError("full disk"), 2, "run the same conversion again\n"),
        (KeyboardInterrupt, 130, "trajstore: interrupted\n"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(convert, "_check_absent", mock.Mock(side_effect=error))
            assert main(words) == code
        assert capsys.readouterr().err.endswith(advice)
    assert main(words) == 0
    cannot_carry = format_named(name).cannot_carry
    kind = format_named(name).kind[:-1]
    said = f"{name} has no place for it: {', '.join(cannot_carry)}\n" if cannot_carry else ""
    assert f"{said}{tmp_path / 'out'}: 1 {kind}\n" in capsys.readouterr().out
    done = convert_from(tmp_path / "out", tmp_path / "back", name)
    assert (done.written, done.is_whole) == (1, True)
    (first,), (second,) = read_all(path), read_all(tmp_path / "back")
    one, other = dict(leaves(first)), dict(leaves(second))
    changed = {at for at in one.keys() | other.keys() if not same(one.get(at), other.get(at))}
    lost = {at: [field for field in cannot_carry if f"{at}.".startswith(f"{field}.")] for at in changed}
    assert (all(lost.values()), {field for of in lost.values() for field in of}) == (True, set(cannot_carry))


def test_only_fields_that_are_there_are_listed_as_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = [AgentTrajectory(messages=[{"role": "user", "content": "a"}]) for _ in range(2)]
    words = ["convert", str(stored(tmp_path / "plain", rollouts)), str(tmp_path / "a"), "--to", "chat"]
    assert main(words) == 0
    assert "not converted" not in capsys.readouterr().out
    rollouts[1].input_ids = torch.arange(3)
    assert convert_to(stored(tmp_path / "store", rollouts), tmp_path / "b", "chat").lost == ["input_ids"]


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


@st.composite
def blocks(draw: st.DrawFn) -> Trajectory:
    """Return steps of several environments with chunks, resets that are not valid, and episodes of any length."""
    steps, batch, chunk = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    numbers = torch.arange(steps * batch, dtype=torch.float64).reshape(steps, batch, 1)
    flags = st.lists(st.booleans(), min_size=steps * batch, max_size=steps * batch)
    ended, cut, invalid = (torch.tensor(draw(flags)).reshape(steps, batch, 1) for _ in range(3))
    last = torch.zeros(steps, batch, chunk - 1, dtype=torch.bool)
    invalid = invalid & torch.cat([torch.zeros(1, batch, 1, dtype=torch.bool), (ended | cut)[:-1]])
    ended, cut = ended & ~invalid, cut & ~invalid
    return Trajectory(
        actions=numbers.repeat(1, 1, 2 * chunk),
        rewards=numbers.repeat(1, 1, chunk).float(),
        terminations=torch.cat([last, ended], -1),
        truncations=torch.cat([last, cut], -1),
        dones=torch.cat([last, ended | cut], -1),
        valid=draw(st.sampled_from([None, ~invalid[..., 0]])),
        curr_obs={"states": numbers},
        next_obs={"states": numbers + batch},
    )


def test_episodes_that_cross_blocks_stay_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of 3 steps of 2 environments: episodes of 5 steps and of 4. The last block has other actions."""
    states = torch.arange(13.0).reshape(-1, 1, 1) + torch.tensor([0.0, 1000.0]).reshape(2, 1)
    ends = torch.zeros(12, 2, 1, dtype=torch.bool)
    ends[4::5, 0] = ends[3::4, 1] = True
    made = [
        Trajectory(
            actions=torch.ones(3, 2, 1, dtype=torch.float64 if start == 9 else torch.float32),
            rewards=torch.ones(3, 2, 1),
            dones=ends[start : start + 3],
            terminations=ends[start : start + 3],
            truncations=torch.zeros(3, 2, 1, dtype=torch.bool),
            curr_obs={"states": states[start : start + 3]},
            next_obs={"states": states[start + 1 : start + 4]},
        )
        for start in range(0, 12, 3)
    ]
    stored(tmp_path / "store", made[:3])
    done = convert_to(tmp_path / "store", tmp_path / "out", "lerobot")
    assert (done.written, done.problems, "late values" in done.lost) == (5, {}, False)
    assert "may have begun" not in caplog.text
    annotate(tmp_path / "store", [1], {"outcome": 1.0})
    done = convert_to(tmp_path / "store", tmp_path / "part", "lerobot", where="trajectory_id > 0")
    assert "1 block follows on blocks that are not there" in caplog.text
    assert "late values" in done.lost
    convert_from(tmp_path / "out", tmp_path / "back", "lerobot")
    rewards = [part.rewards for part in read_all(tmp_path / "back") if isinstance(part, Trajectory)]
    assert sorted(len(rows) for rows in rewards if rows is not None) == [1, 4, 4, 4, 5]
    stored(tmp_path / "other", made)
    done = convert_to(tmp_path / "other", tmp_path / "out-2", "lerobot")
    assert "is cut there, because actions differs" in caplog.text
    assert len(done.problems) == 3, "episodes of other actions than the first"


@pytest.mark.parametrize("steps", [3, 6])
def test_only_blocks_that_cut_episodes_make_beginnings_doubtful(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Episodes of 6 steps in blocks of 6, or of 3; every second episode or block is absent or not chosen."""
    states = torch.arange(6.0).reshape(-1, 1, 1)
    ends = states == 5
    made = [
        Trajectory(
            actions=torch.ones(steps, 1, 1),
            rewards=torch.ones(steps, 1, 1),
            dones=ends[start : start + steps],
            terminations=ends[start : start + steps],
            truncations=torch.zeros(steps, 1, 1, dtype=torch.bool),
            curr_obs={"states": states[start : start + steps] + 10 * episode},
            next_obs={"states": states[start : start + steps] + 10 * episode + 1},
        )
        for episode in range(4)
        for start in range(0, 6, steps)
    ]
    store = stored(tmp_path / "store", made)
    convert_to(store, tmp_path / "out", "lerobot", where="trajectory_id % 2 = 1")
    assert ("may have begun" in caplog.text) == (steps == 3)
    assert ".converting" not in caplog.text
    if steps == 6:
        with writer_to(store) as writer:
            writer.evict(range(0, len(made), 2))
        convert_to(store, tmp_path / "rest", "lerobot")
        assert "may have begun" not in caplog.text


def test_instruction_and_frames_a_second_of_whole_blocks_go_along(tmp_path: Path) -> None:
    """As the page on conversions sets them."""
    ends = torch.zeros(6, 2, 1, dtype=torch.bool)
    ends[2::3] = True
    states = torch.arange(12.0).reshape(6, 2, 1)
    block = Trajectory(
        actions=states,
        rewards=states,
        dones=ends,
        curr_obs={"states": states, "task": "balance"},
        forward_inputs={"fps": 50},
    )
    convert_to(stored(tmp_path / "store", [block]), tmp_path / "set", "lerobot")
    convert_from(tmp_path / "set", tmp_path / "back", "lerobot")
    convert_to(tmp_path / "back", tmp_path / "again", "lerobot")
    assert json.loads((tmp_path / "again/meta/info.json").read_text())["fps"] == 50
    assert [episode.curr_obs["task"] for episode in read_all(tmp_path / "back")] == ["balance"] * 4  # type: ignore[union-attr]


def test_episodes_without_a_place_are_named_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion of which nothing remains leaves no target, so that the next one has its name."""
    rows, ends = torch.arange(5.0)[:, None, None], torch.ones(5, 1, 1, dtype=torch.bool)

    def block(actions: torch.Tensor | None) -> Trajectory:
        return Trajectory(actions=actions, rewards=rows, dones=ends, curr_obs={"states": rows})

    some = stored(tmp_path / "some", [block(rows), block(None)])
    words = ["convert", str(some), str(tmp_path / "set"), "--to", "lerobot"]
    assert main([*words, "--where", "trajectory_id = 1"]) == 2
    reason = (
        "5 were left out (trajectory 1, episode 0; trajectory 1, episode 1; trajectory 1, episode 2; ...): has no "
        "curr_obs or no actions, which this format needs"
    )
    assert f"{tmp_path / 'set'}: nothing could be converted: {reason}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some"]
    assert main(words) == 1
    assert f"{some}: {reason}" in capsys.readouterr().out


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(block=blocks())
def test_any_steps_become_episodes(block: Trajectory, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each valid step is in one episode with its rewards; no episode goes on after its end."""
    folder = tmp_path_factory.mktemp("steps")
    path = stored(folder / "store", [block])
    done = convert_to(path, folder / "out", "lerobot")
    convert_from(folder / "out", folder / "back", "lerobot")
    back = [part for part in read_all(folder / "back") if isinstance(part, Trajectory)]
    assert len(back) == done.written
    assert block.rewards is not None
    assert block.actions is not None
    assert block.dones is not None
    kept = torch.ones(block.rewards.shape[:2], dtype=torch.bool) if block.valid is None else block.valid
    rewards = {
        (a, r) for a, r in zip(block.actions[kept][:, 0].tolist(), block.rewards[kept].sum(-1).tolist(), strict=True)
    }
    steps = [
        (a, r)
        for part in back
        for a, r in zip(part.actions[:, 0, 0].tolist(), part.rewards[:, 0, 0].tolist(), strict=True)
    ]
    assert (len(steps), set(steps)) == (len(rewards), rewards)
    assert not any(part.dones[:-1].any() for part in back)
    assert sum(bool(part.dones[-1].any()) for part in back) == int(block.dones.any(-1)[kept].sum())


def test_a_damaged_episode_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_PORTION_ITEMS", 1)
    path = stored(tmp_path / "store", [full_episode() for _ in range(3)])
    convert_to(path, tmp_path / "out", "lerobot")
    (damaged,) = (tmp_path / "out").glob("data/*/file-001.parquet")
    damaged.write_bytes(damaged.read_bytes()[:-20])
    done = convert_from(tmp_path / "out", tmp_path / "back", "lerobot")
    assert (done.written, list(done.problems)) == (2, ["episode 1"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFoundError, match="it is no data set of"):
        convert_from(tmp_path / "empty", tmp_path / "none", "lerobot")


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
    datasets.Dataset.from_list(rows["trl"]).to_parquet(str(tmp_path / "trl"))
    datasets.Dataset.from_list(rows["verl"]).to_parquet(str(tmp_path / "verl"))
    made = {}
    for name, problems in (("chat", ["line 3", "line 5"]), ("trl", ["trl: row 1"]), ("verl", [])):
        done = convert_from(tmp_path / name, tmp_path / f"{name}-store", name)
        assert list(done.problems) == problems
        (made[name],) = read_all(tmp_path / f"{name}-store")
    assert (made["chat"].messages, made["chat"].metadata) == ([question, answer], {"split": "train"})
    assert (made["trl"].messages, made["trl"].metadata) == ([question, answer], {"difficulty": 3})
    assert made["trl"].reward == Reward(outcome=1.0)
    assert (made["verl"].messages, made["verl"].task_id) == ([question], "gsm8k:7")
    assert made["verl"].metadata == {"ability": "math", "ground_truth": "12", "split": "train"}


def test_rows_of_another_layout_are_named_and_hide_no_others(tmp_path: Path) -> None:
    """Faults of rows that programs write, beside rows with whole numbers as ids and tools as JSON texts."""
    pl = pytest.importorskip("polars")
    messages = [{"role": "user", "content": "7 + 5?"}, {"role": "assistant", "content": "12"}]
    good = {"messages": messages, "task_id": 7, "tools": '[{"type": "function"}]'}
    lines = [
        json.dumps(good),
        json.dumps({**good, "metadata": "none"}),
        json.dumps({**good, "tools": "none"}),
        json.dumps({**good, "metadata": {"split": "a"}, "split": "b"}),
        json.dumps([good]),
        json.dumps({**good, "tools": ""}),
    ]
    (tmp_path / "chat").write_text("\n".join(lines))
    rows: dict[str, list[dict[str, Any]]] = {
        "trl": [{**good, "when": date(2020, 1, 2)}, {**good, "tools": "none"}, {**good, "tools": "[]", "json": "none"}],
        "verl": [
            {"prompt": messages, "data_source": "d", "extra_info": '{"index": 7}'},
            {"prompt": messages, "data_source": "d", "extra_info": "none"},
        ],
    }
    for name, table in rows.items():
        pl.DataFrame(table).write_parquet(tmp_path / name)
    pl.DataFrame({"prompt": [1]}).write_parquet(tmp_path / "numbers")
    pl.DataFrame({"prompt": ["a"], "reward_model": ["a"]}).write_parquet(tmp_path / "texts")
    done = convert_from(tmp_path / "chat", tmp_path / "chat-store", "chat")
    assert [(key, reason.split(":")[0]) for key, reason in done.problems.items()] == [
        ("line 2", "metadata"),
        ("line 3", "tools"),
        ("line 4", "split"),
        ("line 5", "is not a JSON object; make lines of an array with"),
    ]
    first, last = read_all(tmp_path / "chat-store")
    assert (first.task_id, first.metadata, last.metadata) == ("7", {"tools": [{"type": "function"}]}, {})
    done = convert_from(tmp_path / "trl", tmp_path / "trl-store", "trl")
    assert list(done.problems) == ["trl: row 1"]
    assert [part.metadata.get("when") for part in read_all(tmp_path / "trl-store")] == ["2020-01-02", None]
    done = convert_from(tmp_path / "verl", tmp_path / "verl-store", "verl")
    assert list(done.problems) == ["verl: row 1"]
    assert done.problems["verl: row 1"].startswith("extra_info: 'none' is not JSON")
    (tmp_path / "empty").touch()
    faults = (
        ("numbers", "trl", "prompt: is a int"),
        ("texts", "verl", "has another layout"),
        ("empty", "chat", "empty: has no rollouts$"),
    )
    for name, form, reason in faults:
        with pytest.raises(ConfigurationError, match=reason):
            convert_from(tmp_path / name, tmp_path / "none", form)


def test_json_columns_of_datasets_are_decoded_with_their_nulls(tmp_path: Path) -> None:
    """`datasets` makes such columns of tool calls whose arguments differ."""
    datasets = pytest.importorskip("datasets")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call], "tools": [{"name": "f", "parameters": {"b": None}}]}
    tool = {"name": datasets.Value("string"), "parameters": datasets.Json()}
    features = datasets.Features({"messages": datasets.List(datasets.Json()), "tools": datasets.List(tool)})
    table = datasets.Dataset.from_list([row], features=features)
    table.to_parquet(str(tmp_path / "file"))
    convert_from(tmp_path / "file", tmp_path / "store", "trl")
    (part,) = read_all(tmp_path / "store")
    assert (part.messages, part.metadata["tools"]) == (row["messages"], row["tools"])


def test_columns_that_were_added_to_a_file_of_verl_are_kept(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    convert_to(stored(tmp_path / "store", [full_rollout()]), tmp_path / "out", "verl")
    model = {"style": "rule", "ground_truth": "12", "rubric": "short"}
    table = pl.read_parquet(tmp_path / "out").with_columns(split=pl.lit("train"), reward_model=pl.lit(model))
    table.write_parquet(tmp_path / "changed")
    convert_from(tmp_path / "changed", tmp_path / "again", "verl")
    (part,) = read_all(tmp_path / "again")
    assert part.metadata == {**full_rollout().metadata, "split": "train", "reward_model": {"rubric": "short"}}
