"""Token rows from messages equal AgentEvolver's rows and a plain reference for each template."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_hooks.replay.conversation import ChatTemplate, rows_of_messages, with_tokens
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

jinja2 = pytest.importorskip("jinja2")

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPLIT = re.compile("|".join(map(re.escape, SPECIAL)))
STABLE = ("chatml", "qwen2.5", "llama3")


def encode(text: str) -> list[int]:
    """Return one token per special mark and per other character."""
    ids, start = [], 0
    for match in SPLIT.finditer(text):
        ids += [ord(letter) for letter in text[start : match.start()]]
        ids.append(-1 - SPECIAL.index(match.group()))
        start = match.end()
    return ids + [ord(letter) for letter in text[start:]]


@cache
def template_of(name: str) -> ChatTemplate:
    path = Path(__file__).parent / "templates" / f"{name}.jinja"
    compiled = jinja2.Environment().from_string(path.read_text(encoding="utf-8").rstrip("\n"))
    return ChatTemplate(
        lambda messages, ask: str(compiled.render(messages=messages, add_generation_prompt=ask)),
        encode,
        range(-len(SPECIAL), 0),
    )


def reference(messages: list[dict[str, str]], name: str, trained: set[int]) -> tuple[list[int], list[int], int]:
    """Return the messages' row for a stable template, computed without prefixes."""
    ids: list[int] = []
    mask: list[int] = []
    start = -1

    def put(text: str, value: int = 0) -> None:
        new = encode(text)
        ids.extend(new)
        mask.extend([value] * len(new))

    if name == "qwen2.5" and messages[0]["role"] != "system":
        put("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    if name == "llama3":
        put("<|begin_of_text|>")
    for number, message in enumerate(messages):
        if number in trained and start < 0:
            # A text's beginning belongs to the first message, whatever its role.
            start = len(ids) if number else 0
        value = int(number in trained)
        if name == "llama3":
            put(f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n")
            put(message["content"].strip() + "<|eot_id|>", value)
        else:
            put(f"<|im_start|>{message['role']}\n")
            put(message["content"] + "<|im_end|>", value)
            put("\n")
    return ids, mask, start


TEXTS = st.lists(
    st.sampled_from(["go", " ", "\n", "<think>", "</think>", "<think>why</think>", "ünï", "{}", "a b"]), max_size=5
).map("".join)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS}),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(messages=CONVERSATIONS, name=st.sampled_from(STABLE), hint=st.sampled_from([None, "", " think!"]))
def test_rows_are_those_of_a_plain_reference(messages: list[dict[str, str]], name: str, hint: str | None) -> None:
    """Linear contexts give one row and no hint; those that drop thoughts give one row per model turn."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        with pytest.raises(InvalidTrajectoryError, match="none is the model's"):
            rows_of_messages(messages, template_of(name))
        return
    if name != "chatml" and turns[0] == 0:
        return  # with no message before the turn, these templates omit the conversation's start
    if hint is None:
        [row] = rows_of_messages(messages, template_of(name))
        expected = reference(messages[: turns[-1] + 1], name, set(turns))
        assert (row.input_ids, row.loss_mask, row.response_start) == expected
        return
    rows = rows_of_messages(messages, template_of(name), "linear_think", hint)
    assert len(rows) == len(turns)
    for row, turn in zip(rows, turns, strict=True):
        shown = [dict(message) for message in messages[: turn + 1]]
        for number in range(turn):
            if shown[number]["role"] == "assistant":
                shown[number]["content"] = re.sub(r"(?s)<think>.*?</think>", "", shown[number]["content"])
            elif number == turn - 1:
                shown[number]["content"] += hint
        assert (row.input_ids, row.loss_mask, row.response_start) == reference(shown, name, {turn})


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]


def test_a_template_that_changes_earlier_messages_is_refused_with_the_message_that_shows_it() -> None:
    thoughtful = conversation("task", "<think>hm</think>go", "seen", "<think>so</think>take")
    with pytest.raises(InvalidTrajectoryError, match=r"template.*messages\[:2\]"):
        rows_of_messages(thoughtful, template_of("qwen3"))
    first, second = rows_of_messages(thoughtful, template_of("qwen3"), "linear_think")
    assert "".join(chr(token) for token in second.input_ids if token > 0).count("<think>") == 1
    assert sum(first.loss_mask) == len("<think>hm</think>go") + 1
    plain = conversation("task", "go", "seen", "take")
    assert rows_of_messages(plain, template_of("qwen3")) == rows_of_messages(plain, template_of("chatml"))


def test_ids_that_are_there_win() -> None:
    made = with_tokens(AgentTrajectory(messages=conversation("a", "b")), template_of("chatml"))
    assert with_tokens(made, template_of("llama3")) is made
    assert made.old_log_probs is None


def test_what_cannot_become_tokens_is_named() -> None:
    with pytest.raises(ConfigurationError, match="context: 'tree', must be one of 'linear', 'linear_think'"):
        rows_of_messages(conversation("a", "b"), template_of("chatml"), "tree")  # type: ignore[arg-type]
    with pytest.raises(InvalidTrajectoryError, match=r"messages\[1\]\.content: a list"):
        rows_of_messages([*conversation("a"), {"role": "assistant", "content": []}], template_of("chatml"))
