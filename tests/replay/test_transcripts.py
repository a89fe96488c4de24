"""Transcripts as demonstrations in a pool: valid lines, refused lines, resulting rows."""

from __future__ import annotations

import codecs
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.replay.conftest import build
from tests.replay.transcripts import WORDS, conversation, make_tokenizer, turn, write
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.contract import fingerprint_of
from trainer_hooks.replay.rows import rows_of
from trainer_hooks.replay.transcripts import Imported, TranscriptReader, import_transcripts
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

pytest.importorskip("transformers")

RULES = PoolRules(n_rollout=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def import_file(tmp_path: Path, tokenizer: Any, *lines: Any, rules: PoolRules = RULES, **options: Any) -> Imported:
    source = write(tmp_path / "demos.jsonl", *lines)
    return import_transcripts(tmp_path / "pool", source, rules, TranscriptReader(tokenizer, **options))


def held(tmp_path: Path, rules: PoolRules = RULES) -> list[AgentTrajectory]:
    with closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(rules, store=store)
        return [history for several in manager.task2trajectories.values() for history in several]


def one_row(tokenizer: Any, line: Any, tmp_path: Path, **options: Any) -> AgentTrajectory:
    [trajectory] = TranscriptReader(tokenizer, **options).read(write(tmp_path / "one.jsonl", line))
    assert isinstance(trajectory, AgentTrajectory), trajectory
    return trajectory


def trained(tokenizer: Any, one: AgentTrajectory) -> str:
    return str(tokenizer.decode(one.input_ids[one.loss_mask == 1]))


def test_a_conversation_becomes_tokens_without_log_probs(tokenizer: Any, tmp_path: Path) -> None:
    done = import_file(tmp_path, tokenizer, conversation(source="books", rollout_id="r"))
    assert (done.read, done.entered, done.trajectories, done.tasks, done.bad) == (1, 1, 1, 1, [])
    [row] = held(tmp_path)
    assert row.old_log_probs is None
    assert row.entropy is None
    assert row.policy_version is None
    assert trained(tokenizer, row) == "go kitchen<|im_end|>done<|im_end|>"
    assert (row.rollout_id, row.query, row.tokenizer_fingerprint) == ("r", "bring the cup", fingerprint_of(tokenizer))
    assert row.metadata["demonstration"] is True
    assert row.metadata["transcript"] == {"source": "books", "file": "demos.jsonl", "line": 1}


def test_an_import_that_was_interrupted_goes_on(tokenizer: Any, tmp_path: Path) -> None:
    texts = [f"{first} {other}" for first in WORDS for other in WORDS][:150]
    source = write(tmp_path / "demos.jsonl", *[conversation(f"t{at % 20}", text) for at, text in enumerate(texts)])

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_transcripts(tmp_path / "pool", source, RULES, TranscriptReader(tokenizer), interrupt)
    there = len(held(tmp_path))
    assert 0 < there < len(texts)
    done = import_transcripts(tmp_path / "pool", source, RULES, TranscriptReader(tokenizer))
    assert done.refused == {"duplicate": there}
    assert done.trajectories == len(texts)


def other(**values: Any) -> dict[str, Any]:
    return {**conversation("bad"), **values}


IDS = [{**message, "token_ids": [1]} for message in turn("go", "go")]
BAD: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ("[1]", "a list, must be an object"),
    (other(task_id=None), "task_id: None, must be a text"),
    (other(messages=[]), "messages: must be a list"),
    (other(messages=[{"content": "go"}]), "messages[0]: must be an object with a role"),
    (other(messages=[*turn("go"), {"role": "assistant", "content": None}]), "messages[1].content: a NoneType"),
    (
        other(messages=[{"role": "user", "content": [{"type": "image_url"}]}, *turn("", "go")[1:]]),
        "messages[0].content: has parts that are not text",
    ),
    (other(messages=turn("go")), "none is the model's"),
    (other(reward=None), "neither reward nor success"),
    (other(reward=True), "reward: True, must be a number"),
    (other(reward=0, success=True), "success: true, but an outcome of 0 is none"),
    (other(messages=[{**IDS[0], "token_ids": None}, IDS[1]]), "messages[0]: has no token_ids, but others have"),
    (other(messages=[{**IDS[0], "token_ids": [10**6]}, IDS[1]]), "messages[0].token_ids: must be a list of ids"),
    (other(messages=[{**turn("go")[0], "name": {"no": "text"}}, *turn("", "go")[1:]]), "the chat template refuses"),
]


def test_one_bad_line_hides_none_of_its_neighbours(tmp_path: Path) -> None:
    strict = make_tokenizer()
    strict.chat_template = (
        "{% if messages[0].name %}{{ raise_exception('no names') }}{% endif %}" + strict.chat_template
    )
    lines = [line for bad_line, _ in BAD for line in (bad_line, conversation(f"t{len(str(bad_line))}"))]
    done = import_file(tmp_path, strict, *lines)
    assert [bad_line.line for bad_line in done.bad] == list(range(1, 2 * len(BAD), 2))
    for bad_line, (_, reason) in zip(done.bad, BAD, strict=True):
        assert reason in bad_line.reason
    assert done.entered + done.refused["duplicate"] == len(BAD)


def test_outcomes(tokenizer: Any, tmp_path: Path) -> None:
    lines = [
        conversation("a", reward=None, success=True),
        conversation("b", reward=None, success=False),
        conversation("c", reward=0.5),
        conversation("d", reward=None),
    ]
    done = import_file(tmp_path, tokenizer, *lines, outcome=1.0)
    assert (done.entered, done.refused) == (2, {"not_worth_keeping": 2})
    assert [history.task_id for history in held(tmp_path)] == ["a", "d"]


def test_ids_that_a_transcript_brings_count(tokenizer: Any, tmp_path: Path) -> None:
    plain = one_row(tokenizer, conversation(), tmp_path)
    spans = [
        tokenizer.encode(f"<|im_start|>{entry['role']}\n{entry['content']}<|im_end|>\n")
        for entry in conversation()["messages"]
    ]
    spans[-1] = spans[-1][:-1]  # an engine's output may lack the end mark
    messages = [{**entry, "token_ids": ids} for entry, ids in zip(conversation()["messages"], spans, strict=True)]
    entry = one_row(tokenizer, conversation(messages=messages), tmp_path)
    assert entry.input_ids.tolist() == plain.input_ids.tolist()[: len(entry.input_ids)]
    assert trained(tokenizer, entry) == trained(tokenizer, plain)
    assert entry.response_start == plain.response_start
    assert all("token_ids" not in message for message in entry.messages)
    mask = [0, 0, 0, *[1] * (len(spans[1]) - 3)]
    messages[1]["loss_mask"] = mask
    masked = one_row(tokenizer, conversation(messages=messages), tmp_path)
    assert masked.loss_mask[len(spans[0]) : len(spans[0]) + len(mask)].tolist() == mask
    rows = rows_of(one_row(tokenizer, conversation(messages=messages), tmp_path, context="linear_think"))
    assert len(rows) == 2


def calling_tokenizer(calls: str = "m.tool_calls or []", content: str = "m.content") -> Any:
    """Return a tokenizer whose template prints the place of tool calls."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ {content} }}}}{{% for c in {calls} %}}"
        "{{ c.function.arguments.place }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if tools %}{{ tools[0].name }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("context", ["linear", "linear_think"])
@pytest.mark.parametrize(
    ("message", "template", "part"),
    [
        ({"tool_calls": 1}, {"calls": "[]"}, "tool_calls[0]"),
        ({"tool_calls": 2}, {"calls": "(m.tool_calls or [])[:1]"}, "tool_calls[1]"),
        ({"content": "go", "reasoning_content": "why"}, {}, "reasoning_content"),
        ({"content": "<think>why</think>go"}, {"content": "m.content.split('</think>')[-1]"}, "content (<think>)"),
        ({"content": "cup"}, {"content": "m.content if m.role == 'user'"}, "content"),
    ],
)
def test_a_part_that_the_template_leaves_out_is_refused_by_name(
    message: dict[str, Any], template: dict[str, str], part: str, context: str, tmp_path: Path
) -> None:
    calls = [{"function": {"name": "go", "arguments": {"place": place}}} for place in ("kitchen", "cup")]
    if "tool_calls" in message:
        message = {"content": "", "tool_calls": calls[: message["tool_calls"]]}
    line = conversation(messages=[*turn("take the cup"), {"role": "assistant", **message}])
    [bad] = import_file(tmp_path, calling_tokenizer(**template), line, context=context).bad
    assert bad.reason.startswith(f"messages[1].{part}: the chat template leaves it out")
    entered = import_file(
        tmp_path, calling_tokenizer(content="(m.reasoning_content or '') ~ m.content"), line, context=context
    )
    assert entered.entered == 1


def test_tool_calls_and_parts_are_text_for_the_template(tmp_path: Path) -> None:
    tokenizer = calling_tokenizer()
    call = {"type": "function", "function": {"name": "go", "arguments": '{"place": "kitchen"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "bring "}, {"type": "text", "text": "the cup"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    row = one_row(tokenizer, conversation(messages=messages), tmp_path)
    assert trained(tokenizer, row) == "kitchen<|im_end|>"
    assert row.query == "bring the cup"


def test_weights_calls_and_refusals_of_openai(tokenizer: Any, tmp_path: Path) -> None:
    first, second, third, last = turn("bring the cup", "go", "seen", "done")
    for context in ("linear", "linear_think"):
        line = conversation(messages=[first, {**second, "weight": 0}, third, {**last, "weight": 1}])
        assert trained(tokenizer, one_row(tokenizer, line, tmp_path, context=context)) == "done<|im_end|>"
    ids = [{**entry, "token_ids": tokenizer.encode(entry["content"])} for entry in line["messages"]]
    assert trained(tokenizer, one_row(tokenizer, conversation(messages=ids), tmp_path)) == "done"
    dialogue = [{**first, "role": "function", "name": "f"}, {"role": "assistant", "content": None, "refusal": "drop"}]
    call = {"name": "go", "arguments": '{"place": "kitchen"}'}
    called = [first, {"role": "assistant", "content": None, "function_call": call}, *dialogue]
    entry = one_row(calling_tokenizer(), conversation(messages=called), tmp_path)
    assert [message["role"] for message in entry.messages] == ["user", "assistant", "tool", "assistant"]
    function = {"name": "go", "arguments": {"place": "kitchen"}}
    assert entry.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
    assert trained(tokenizer, entry) == "kitchen<|im_end|>drop<|im_end|>"
    for messages, reason in (
        ([first, {**second, "weight": 0}], "none is the model's with a weight"),
        ([first, {**second, "weight": 0.5}], r"messages[1].weight: 0.5, must be 0 or 1"),
        ([ids[0], {**ids[1], "loss_mask": [1]}, *ids[2:]], "or has weight 0"),
    ):
        [bad] = import_file(tmp_path, tokenizer, conversation(messages=messages)).bad
        assert reason in bad.reason


def test_texts_stay_inside_of_their_messages(tokenizer: Any, tmp_path: Path) -> None:
    """Control token names in texts, a legitimate added token, and a byte order mark."""
    content = "go<|im_end|>\n<|im_start|>assistant\ntake"
    line = conversation(messages=turn(f"<think>{content}", f"<think>why</think>{content}"), query=content)
    source = tmp_path / "demos.jsonl"
    source.write_bytes(codecs.BOM_UTF8 + write(source, line).read_bytes())
    done = import_transcripts(tmp_path / "pool", source, RULES, TranscriptReader(tokenizer))
    assert (done.entered, done.control_tokens, done.bad) == (1, 4, [])
    [row] = held(tmp_path)
    assert row.input_ids is not None
    assert tokenizer.decode(row.input_ids).count("<|im_end|>") == 2
    assert row.messages[1]["content"] == "<think>why</think>" + content.replace("<|", "< |")
    assert row.metadata["transcript"]["control_tokens"] == 4


def test_rules_that_would_never_let_demonstrations_out_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    strict = PoolRules(n_rollout=4, max_policy_age=5)
    message = "max_policy_age: 5, but demonstrations have no policy version"
    with pytest.raises(ConfigurationError, match=message):
        import_file(tmp_path, tokenizer, conversation(), rules=strict)
    import_file(tmp_path, tokenizer, conversation())
    with pytest.raises(ConfigurationError, match=message):
        held(tmp_path, strict)
    with pytest.raises(ConfigurationError, match=message):
        ExperienceManager(strict).save_trajectories_to_memory(held(tmp_path))


def demonstration(tokenizer: Any, tmp_path: Path, task: str = "a", last: str = "done") -> AgentTrajectory:
    return one_row(tokenizer, conversation(task, last), tmp_path)


def test_demonstrations_can_be_drawn_at_once_and_come_marked(tokenizer: Any, tmp_path: Path) -> None:
    manager = ExperienceManager(RULES)
    manager.seed([demonstration(tokenizer, tmp_path, task) for task in "ab"])
    assert manager.difficulty2task_dict == {0: ("a", "b")}
    assert sorted(manager.sample_tasks_from_replaypool(2)) == ["a", "b"]
    [row] = manager.get_offpolicy_batch(["a"])
    assert row.metadata["is_experience_replay"] is True
    assert row.old_log_probs is None
    assert manager.metrics()["experience_replay/pool_demonstrations"] == 2.0
    other = ExperienceManager(RULES)
    other.load_state_dict(manager.state_dict())
    other.save_experience_pool_to_disk(tmp_path / "files")
    third = ExperienceManager(RULES)
    third.load_experience_pool_from_disk(tmp_path / "files")
    assert third.metrics()["experience_replay/pool_demonstrations"] == 2.0
    assert third.get_valid_replay_task_ids() == ["a", "b"]


@pytest.mark.parametrize("strategy", ["linear", "sqrt", "linear_clip"])
def test_weights_that_leave_demonstrations_out_are_told(tokenizer: Any, tmp_path: Path, strategy: Any) -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, task_sampling=strategy))
    manager.seed([demonstration(tokenizer, tmp_path)])
    assert manager.sample_tasks_from_replaypool(1) == []
    assert manager.why_nothing() == f"task_sampling: {strategy} gives no weight to difficulty 0, and no other is there"


def test_rollouts_say_more_of_a_task_than_its_demonstration(tokenizer: Any, tmp_path: Path) -> None:
    manager = ExperienceManager(RULES)
    manager.admit([build(tokens=number, outcome=float(number < 2)) for number in range(4)])
    manager.seed([demonstration(tokenizer, tmp_path)])
    assert manager.difficulty2task_dict == {2: ("a",)}
    manager.admit([build(tokens=number, outcome=1.0) for number in range(4)])
    assert manager.skip_uid_set == {"a"}
    manager.seed([demonstration(tokenizer, tmp_path)])
    assert manager.get_valid_replay_task_ids() == [], "a solved task needs no demonstration"


def test_a_rollout_with_its_tokens_takes_the_place_of_a_demonstration(tokenizer: Any, tmp_path: Path) -> None:
    with closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(RULES, store=store)
        first, other = demonstration(tokenizer, tmp_path), demonstration(tokenizer, tmp_path, last="drop")
        manager.seed([first, other])
        rollout = demonstration(tokenizer, tmp_path)
        rollout.metadata = {}
        rollout.old_log_probs = -rollout.response_mask.float()
        rollout.entropy = 1.0
        assert manager.save_trajectories_to_memory([rollout]) == 1
        assert manager.seed([first]) == {"duplicate": 1}
        without_log_probs = [held.old_log_probs is None for held in manager.task2trajectories["a"]]
        assert without_log_probs == [True, False]
    assert [held.old_log_probs is None for held in held(tmp_path)] == [True, False]


def test_a_full_task_gives_up_demonstrations_first(tokenizer: Any, tmp_path: Path) -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=2))
    demos = [demonstration(tokenizer, tmp_path, last=last) for last in ("done", "drop", "take")]
    assert manager.seed(demos) == {"not_better": 1}
    manager.save_trajectories_to_memory([build(tokens=1, entropy=9.0), build(tokens=2, entropy=5.0)])
    assert manager.seed(demos) == {"not_better": 3}
    assert [history.entropy for history in manager.task2trajectories["a"]] == [9.0, 5.0]
    manager = ExperienceManager(RULES)
    manager.seed(demos[:1])
    manager.save_trajectories_to_memory([build(tokens=1, entropy=9.0)])
    order = [history.old_log_probs is None for history in manager.get_offpolicy_batch(["a"], 2)]
    assert order == [False, True], "an entropy that is unknown stands behind all others"


def test_the_programs_of_the_page_do_what_it_says(
    tokenizer: Any, tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (project_root / "docs" / "howto" / "demonstrations.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace("gsm8k:12", "b")
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("path/to/model")
    write(tmp_path / "demos.jsonl", conversation("a"), "{")
    names: dict[str, Any] = {}
    exec(compile(code, "demonstrations.md", "exec"), names)
    assert (names["done"].entered, len(names["done"].bad), names["refused"]) == (1, 1, {})
    store = BufferStore.open("runs/a/trajstore/pool")
    assert ExperienceManager(RULES, store=store).get_task_ids() == ["a", "b"]
    store.close()
