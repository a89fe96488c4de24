"""Inserting and removing experience restores the messages exactly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_hooks.guidance import (
    EXPERIENCE_TEMPLATE,
    ExperienceTemplate,
    ExperienceWorker,
    Guidance,
    Insertion,
    Retrieved,
    TrajExpConfig,
    plain_messages,
    put_in,
    strip_template,
    take_out,
    with_guidance,
)
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

# Pieces that could break a pattern: the template's tags and text, braces, regex characters.
PIECES = [
    "<EXP>",
    "</EXP>",
    "</EXP>\n\n",
    EXPERIENCE_TEMPLATE,
    "{}",
    "{0}",
    "{x}",
    r"\1",
    "(.*?)",
    "[",
    "$",
    "^",
    "\n",
    "\r\n",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=6).map("".join)
TEMPLATES = st.one_of(
    st.just(EXPERIENCE_TEMPLATE),
    st.tuples(TEXTS, TEXTS).map(lambda sides: f"{sides[0]}{{}}{sides[1]}").filter(lambda text: text.count("{}") == 1),
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.one_of(TEXTS, PARTS)}
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=st.lists(st.tuples(MESSAGES, st.lists(TEXTS, max_size=3)), min_size=1, max_size=4), text=TEMPLATES)
def test_several_insertions_over_several_turns_come_out_again(
    conversation: list[tuple[list[dict[str, Any]], list[str]]], text: str
) -> None:
    template = ExperienceTemplate.of(text)
    plain: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    insertions: list[Insertion] = []
    for turn, experiences in conversation:
        plain += turn
        messages += copy.deepcopy(turn)
        for experience in experiences:
            given_before = copy.deepcopy(messages)
            changed, insertion = put_in(messages, template.fill(experience))
            assert messages == given_before, "the messages that were given stay as they are"
            messages = changed
            insertions.append(insertion)
    assert take_out(messages, insertions) == plain


def test_what_was_changed_since_is_refused_by_message() -> None:
    changed, insertion = put_in([{"role": "user", "content": "task"}], "tip ")
    changed[0]["content"] = "tiptask"
    with pytest.raises(InvalidTrajectoryError, match=r"messages\[0\].content: "):
        take_out(changed, [insertion])
    with pytest.raises(InvalidTrajectoryError, match=r"messages\[3\]"):
        take_out([{"role": "user", "content": "tip task"}], [Insertion(3, "tip ")])


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}], [{"role": "user"}]])
def test_no_place_for_experience_is_an_error(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidTrajectoryError, match="messages"):
        put_in(messages, "tip")


def test_template_without_record_is_found_by_its_look() -> None:
    template = ExperienceTemplate.of(EXPERIENCE_TEMPLATE)
    text = "a" + template.fill("one\ntwo") + "b" + template.fill("{}") + "c"
    assert strip_template(text, template) == (["one\ntwo", "{}"], "abc")
    assert strip_template("{x}", ExperienceTemplate.of("{}")) == ([], "{x}")


def test_record_of_a_trajectory_says_what_was_shown() -> None:
    changed, insertion = put_in([{"role": "user", "content": "task"}], "tip ")
    guidance = Guidance("discard", ("7",), (insertion,))
    trajectory = with_guidance(AgentTrajectory(messages=changed, metadata={"other": 1}), guidance)
    assert Guidance.of(trajectory) == guidance
    assert trajectory.metadata["other"] == 1
    assert plain_messages(trajectory) == [{"role": "user", "content": "task"}]
    assert Guidance.of(AgentTrajectory()) is None
    with pytest.raises(InvalidTrajectoryError, match=r"metadata\.guidance"):
        Guidance.of(AgentTrajectory(metadata={"guidance": {"train_mode": "maybe"}}))


class Finds:
    """A maker with experience for every query."""

    def retrieve(self, query: str, k: int) -> Retrieved:
        return Retrieved("tip", ("0",))

    def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
        return 0

    def close(self) -> None: ...


def test_prompts_without_a_place_are_counted_and_the_first_of_each_kind_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = ExperienceWorker(Finds(), template=ExperienceTemplate.of("<{}>"))
    for number in range(25):
        config = TrajExpConfig(add_exp=True, task_id=f"task {number}")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}] * (number % 3)
        worker.manage_rollout_context([*messages, {"role": "user", "content": None}], config)
    worker.manage_rollout_context([{"role": "user", "content": 3}], TrajExpConfig(add_exp=True))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "'task 0' is not guided" in warnings[0]
    assert "content: a int" in warnings[1]
    assert worker.metrics()["guidance/retrieve/no_place"] == 26.0
