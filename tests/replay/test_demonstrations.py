"""Conversations as demonstrations in a pool: converted, made into rows, seeded, drawn."""

from __future__ import annotations

import codecs
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.pages import section
from tests.replay.conftest import build
from tests.replay.transcripts import conversation, make_tokenizer, turn, write
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.contract import fingerprint_of
from trainer_hooks.replay.conversation import Context
from trainer_hooks.replay.exchange import Exchanged, seed_pool
from trainer_hooks.replay.message_rows import MessageTokenizer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.interop.convert import convert_from
from trajstore.trajectory import AgentTrajectory, Reward

pytest.importorskip("transformers")

RULES = PoolRules(n_rollout=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def seeded(
    tmp_path: Path,
    tokenizer: Any,
    *lines: Any,
    context: Context = "linear",
    rules: PoolRules = RULES,
    outcome: float | None = None,
) -> Exchanged:
    """Convert lines to a new store and seed the pool from it."""
    source = write(tmp_path / "demos.jsonl", *lines)
    store = tmp_path / f"demos_{len(list(tmp_path.iterdir()))}"
    convert_from(source, store, "chat")
    made = MessageTokenizer.of(tokenizer, context)
    return seed_pool(tmp_path / "pool", store, rules, tokenizer=made, outcome=outcome)


def held(tmp_path: Path, rules: PoolRules = RULES) -> list[AgentTrajectory]:
    with closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(rules, store=store)
        return [history for several in manager.task2trajectories.values() for history in several]


def rows_of(tokenizer: Any, messages: list[dict[str, Any]], context: Context = "linear") -> AgentTrajectory:
    rollout = AgentTrajectory(messages=messages, task_id="a", rollout_id="r", reward=Reward(outcome=1.0))
    return MessageTokenizer.of(tokenizer, context).rows_of(rollout)


def demonstration(tokenizer: Any, task: str = "a", last: str = "done") -> AgentTrajectory:
    made = rows_of(tokenizer, conversation(task, last)["messages"])
    made.task_id = task
    return made


def trained(tokenizer: Any, one: AgentTrajectory) -> str:
    return str(tokenizer.decode(one.input_ids[one.loss_mask == 1]))


def test_a_conversation_becomes_tokens_without_log_probs(tokenizer: Any, tmp_path: Path) -> None:
    done = seeded(tmp_path, tokenizer, conversation(source="books", rollout_id="r"), conversation("b"))
    assert (done.read, done.entered, done.tokenized, done.without_log_probs, done.problems) == (2, 2, 2, 2, ())
    row, other = held(tmp_path)
    assert row.old_log_probs is None
    assert row.entropy is None
    assert row.policy_version is None
    assert trained(tokenizer, row) == "go kitchen<|im_end|>done<|im_end|>"
    assert (row.rollout_id, row.tokenizer_fingerprint) == ("r", fingerprint_of(tokenizer))
    assert other.rollout_id.startswith("demos_"), "the name of the store, and the id there"
    assert row.metadata["demonstration"] is True
    assert row.metadata["source"] == "books"
    assert seeded(tmp_path, tokenizer, conversation(), conversation("b")).refused == {"duplicate": 2}


BAD: list[tuple[list[dict[str, Any]], str]] = [
    ([*turn("go"), {"role": "assistant", "content": None}], "messages[1].content: a NoneType"),
    ([{"role": "user", "content": [{"type": "image_url"}]}, *turn("", "go")[1:]], "has parts that are not text"),
    (turn("go"), "none is the model's"),
    ([{**message, "token_ids": [1]} for message in turn("go", "go")], "messages[0].token_ids: tokens would be made"),
    ([{**turn("go")[0], "name": {"no": "text"}}, *turn("", "go")[1:]], "the chat template refuses"),
    ([{**message, "weight": 0} for message in turn("go", "go")], "none is the model's with a weight"),
    ([{**message, "weight": 0.5} for message in turn("go", "go")], "messages[0].weight: 0.5, must be 0 or 1"),
]


def test_one_bad_conversation_hides_none_of_its_neighbours(tmp_path: Path) -> None:
    strict = make_tokenizer()
    strict.chat_template = (
        "{% if messages[0].name %}{{ raise_exception('no names') }}{% endif %}" + strict.chat_template
    )
    lines = [
        line
        for at, (messages, _) in enumerate(BAD)
        for line in (conversation(f"bad{at}", messages=messages), conversation(f"good{at}"))
    ]
    done = seeded(tmp_path, strict, *lines)
    assert (done.entered, done.refused) == (len(BAD), {"no_tokens": len(BAD)})
    for at, (problem, (_, reason)) in enumerate(zip(done.problems, BAD, strict=True)):
        assert f"of task 'bad{at}'" in problem
        assert reason in problem


def test_outcomes(tokenizer: Any, tmp_path: Path) -> None:
    lines = [
        conversation("a", reward=None, success=True),
        conversation("b", reward=None, success=False),
        conversation("c", reward=0.5),
        conversation("d", reward=None),
    ]
    done = seeded(tmp_path, tokenizer, *lines, outcome=1.0)
    assert done.entered == 2
    assert done.left_out == ("2 are no successes: the highest outcome is 0.5, success_threshold 1",)
    assert [history.task_id for history in held(tmp_path)] == ["a", "d"]
    assert seeded(tmp_path, tokenizer, *lines).refused == {"duplicate": 1, "no_outcome": 1}


def calling_tokenizer(calls: str = "m.tool_calls or []", content: str = "m.content") -> Any:
    """Return a tokenizer whose template prints the place of tool calls, and the first tool."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}{{ tools[0].name }}{% endif %}"
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ {content} }}}}{{% for c in {calls} %}}"
        "{{ c.function.arguments.place }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
    message: dict[str, Any], template: dict[str, str], part: str, context: Context
) -> None:
    calls = [{"function": {"name": "go", "arguments": {"place": place}}} for place in ("kitchen", "cup")]
    if "tool_calls" in message:
        message = {"content": "", "tool_calls": calls[: message["tool_calls"]]}
    messages = [*turn("take the cup"), {"role": "assistant", **message}]
    with pytest.raises(InvalidTrajectoryError, match=re.escape(f"messages[1].{part}: the chat template leaves it out")):
        rows_of(calling_tokenizer(**template), messages, context)
    printing = calling_tokenizer(content="(m.reasoning_content or '') ~ m.content")
    assert rows_of(printing, messages, context).input_ids is not None


def test_openai_s_messages_are_text_for_the_template(tokenizer: Any, tmp_path: Path) -> None:
    """Parts, calls of tools and functions, refusals, weights, and tools."""
    first, second, third, last = turn("bring the cup", "go", "seen", "done")
    for context in ("linear", "linear_think"):
        made = rows_of(tokenizer, [first, {**second, "weight": 0}, third, {**last, "weight": 1}], context)
        assert trained(tokenizer, made) == "done<|im_end|>"
    call = {"name": "go", "arguments": '{"place": "kitchen"}'}
    answers = [{**first, "role": "function", "name": "f"}, {"role": "assistant", "content": None, "refusal": "drop"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "bring "}, {"type": "text", "text": "the cup"}]}
    for called in ({"function_call": call}, {"tool_calls": [{"type": "function", "function": call}]}):
        messages = [parts, {"role": "assistant", "content": None, **called}, *answers]
        made = rows_of(calling_tokenizer(), messages)
        assert [message["role"] for message in made.messages] == ["user", "assistant", "tool", "assistant"]
        function = {"name": "go", "arguments": {"place": "kitchen"}}
        assert made.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
        assert made.messages[0]["content"] == "bring the cup"
        assert trained(tokenizer, made) == "kitchen<|im_end|>drop<|im_end|>"
    seeded(tmp_path, calling_tokenizer(), conversation(tools=[{"name": "take"}]))
    [row] = held(tmp_path)
    assert tokenizer.decode(row.input_ids).startswith("take")


def test_texts_stay_inside_of_their_messages(tokenizer: Any, tmp_path: Path) -> None:
    """Control token names in texts, a legitimate added token, and a byte order mark."""
    content = "go<|im_end|>\n<|im_start|>assistant\ntake"
    line = conversation(messages=turn(f"<think>{content}", f"<think>why</think>{content}"))
    source = write(tmp_path / "demos.jsonl", line)
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    convert_from(source, tmp_path / "demos", "chat")
    done = seed_pool(tmp_path / "pool", tmp_path / "demos", RULES, tokenizer=MessageTokenizer.of(tokenizer))
    assert (done.entered, done.control_tokens) == (1, 4)
    [row] = held(tmp_path)
    assert row.input_ids is not None
    assert tokenizer.decode(row.input_ids).count("<|im_end|>") == 2
    assert row.messages[1]["content"] == "<think>why</think>" + content.replace("<|", "< |")
    assert row.metadata["control_tokens"] == 4


def test_rules_that_would_never_let_demonstrations_out_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    strict = PoolRules(n_rollout=4, max_policy_age=5)
    message = "max_policy_age: 5, but demonstrations have no policy version"
    with pytest.raises(ConfigurationError, match=message):
        seeded(tmp_path, tokenizer, conversation(), rules=strict)
    seeded(tmp_path, tokenizer, conversation())
    with pytest.raises(ConfigurationError, match=message):
        held(tmp_path, strict)
    with pytest.raises(ConfigurationError, match=message):
        ExperienceManager(strict).seed(held(tmp_path))


def test_demonstrations_can_be_drawn_at_once_and_come_marked(tokenizer: Any, tmp_path: Path) -> None:
    manager = ExperienceManager(RULES)
    manager.seed([demonstration(tokenizer, task) for task in "ab"])
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
def test_weights_that_leave_demonstrations_out_are_told(tokenizer: Any, strategy: Any) -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, task_sampling=strategy))
    manager.seed([demonstration(tokenizer)])
    assert manager.sample_tasks_from_replaypool(1) == []
    assert manager.why_nothing() == f"task_sampling: {strategy} gives no weight to difficulty 0, and no other is there"


def test_rollouts_say_more_of_a_task_than_its_demonstration(tokenizer: Any) -> None:
    manager = ExperienceManager(RULES)
    manager.admit([build(tokens=number, outcome=float(number < 2)) for number in range(4)])
    manager.seed([demonstration(tokenizer)])
    assert manager.difficulty2task_dict == {2: ("a",)}
    manager.admit([build(tokens=number, outcome=1.0) for number in range(4)])
    assert manager.skip_uid_set == {"a"}
    manager.seed([demonstration(tokenizer)])
    assert manager.get_valid_replay_task_ids() == [], "a solved task needs no demonstration"


def test_a_rollout_with_its_tokens_takes_the_place_of_a_demonstration(tokenizer: Any, tmp_path: Path) -> None:
    with closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(RULES, store=store)
        first, other = demonstration(tokenizer), demonstration(tokenizer, last="drop")
        manager.seed([first, other])
        rollout = demonstration(tokenizer)
        rollout.metadata = {}
        rollout.old_log_probs = -rollout.response_mask.float()
        rollout.entropy = 1.0
        assert not manager.seed([rollout])
        assert manager.seed([first]) == {"duplicate": 1}
        assert [held.old_log_probs is None for held in manager.task2trajectories["a"]] == [True, False]
    assert [held.old_log_probs is None for held in held(tmp_path)] == [True, False]


def test_a_full_task_gives_up_demonstrations_first(tokenizer: Any) -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=2))
    demos = [demonstration(tokenizer, last=last) for last in ("done", "drop", "take")]
    assert manager.seed(demos) == {"not_better": 1}
    manager.seed([build(tokens=1, entropy=9.0), build(tokens=2, entropy=5.0)])
    assert manager.seed(demos) == {"not_better": 3}
    assert [history.entropy for history in manager.task2trajectories["a"]] == [9.0, 5.0]
    manager = ExperienceManager(RULES)
    manager.seed(demos[:1])
    manager.seed([build(tokens=1, entropy=9.0)])
    order = [history.old_log_probs is None for history in manager.get_offpolicy_batch(["a"], 2)]
    assert order == [False, True], "an entropy that is unknown stands behind all others"


def test_the_programs_of_the_page_do_what_it_says(
    tokenizer: Any, tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = section((project_root / "docs" / "howto" / "agents.md").read_text(), "Start from demonstrations")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace("gsm8k:12", "b")
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("path/to/model")
    write(tmp_path / "demos.jsonl", conversation("a"), "{")
    names: dict[str, Any] = {}
    exec(compile(code, "demonstrations.md", "exec"), names)
    assert (names["done"].entered, names["done"].problems, names["refused"]) == (1, (), {})
    store = BufferStore.open("runs/a/trajstore/rollouts")
    assert ExperienceManager(RULES, store=store).get_task_ids() == ["a", "b"]
    store.close()
