"""Configuration of guidance, and the calls of a training loop."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.grpo.rollout import turns_as_rows
from tests.guidance.rollouts import rollout
from tests.verl_plugin.assets import make_tokenizer
from trainer_hooks.batch import build_batch
from trainer_hooks.guidance import Experience, Guidance, LocalMaker, Retrieved, TrajExpConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.guidance.summary import unicode_of
from trainer_hooks.plan import PlannedTask, rows_of_plan
from trainer_hooks.replay.conversation import ChatTemplate, with_tokens
from trainer_hooks.replay.message_rows import load_tokenizer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, Reward


def test_defaults() -> None:
    assert GuidanceConfig.from_config({}) == GuidanceConfig()
    assert (GuidanceConfig(base_url="http://a").workers, GuidanceConfig().workers) == (8, 1)
    assert GuidanceConfig(summary_workers=3).workers == 3
    for unquoted in (0.2, "0.2"):
        assert GuidanceConfig.from_config({"experience_maker": {"dialect": unquoted}}).dialect == "0.2"


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ({"experience_maker": {"summary_workers": 0}}, ["summary_workers: 0, must be `int` >= 1"]),
        ({"experience_maker": {"dialect": 0.3}}, ["dialect: '0.3', must be one of 'auto', '0.2', '0.4'"]),
        (
            {"experience_maker": {"base_url": "http://a"}, "exp_manager": {"reme": {"base_url": "http://a"}}},
            ["same opt"],
        ),
        ({"exp_manager": {"rolout_ratio": 0.1}}, ["exp_manager.rolout_ratio: unknown key; known are"]),
        ({"experience_maker": {"rollout_ratio": 0.1}}, ["experience_maker.rollout_ratio: unknown key"]),
        (
            {"exp_manager": {"train_rollout_expmode": "some", "rollout_expratio": 2}},
            [
                "exp_manager.train_rollout_expmode: 'some', must be one of 'woexp', 'all', 'mixed'",
                "exp_manager.rollout_expratio: 2",
            ],
        ),
        ({"exp_manager": {"train_sample_expmode": "keep"}}, ["must be one of 'allkeep', 'alldiscard', 'hybrid'"]),
        ({"exp_manager": {"experience_template": "no place"}}, ["a text with one {}"]),
        ({"experience_maker": {"base_url": "localhost"}}, ["experience_maker.base_url: 'localhost'"]),
        ({"experience_maker": {"updated_freq": 2}}, ["0 without enable_summarizer"]),
        ({"experience_maker": {"enable_summarizer": "yes"}}, ["must be true or false"]),
        ({"experience_maker": {"store": {"path": "x", "size": 3}}}, ["experience_maker.store.size: unknown key"]),
        ({"experience_maker": {"store": {"path": "x", "capacity": 0}}}, ["store.capacity: 0, must be"]),
        ({"experience_maker": 3}, ["experience_maker: must be a mapping"]),
    ],
)
def test_wrong_options_are_refused_by_the_names_they_were_given(config: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        GuidanceConfig.from_config(config)
    for message in messages:
        assert message in str(caught.value)


ON: dict[str, Any] = {
    "enable_summarizer": True,
    "enable_context_generator": True,
    "updated_freq": 2,
    "train_rollout_expmode": "all",
}


def rolled_out(hook: GuidanceHook, step: int) -> tuple[list[AgentTrajectory], list[TrajExpConfig]]:
    plan = [PlannedTask("cup", 2, ()), PlannedTask("book", 1, ())]
    configs = hook.before_rollout(plan)
    fresh = []
    for number, (task, config) in enumerate(zip(["cup", "cup", "book"], configs, strict=True)):
        messages = hook.context([{"role": "user", "content": f"please do {task}"}], config)
        messages.append({"role": "assistant", "content": f"do {task} so"})
        made = AgentTrajectory(
            messages=messages, reward=Reward(outcome=1.0), task_id=task, rollout_id=f"{step}-{number}"
        )
        fresh.append(hook.finished(made, config))
    return fresh, configs


def test_a_loop_goes_from_rollouts_to_experience_and_back(tmp_path: Path) -> None:
    config = GuidanceConfig(**ON, store={"path": str(tmp_path / "experience")})
    with GuidanceHook(config) as hook:
        for step in (1, 2):
            fresh, configs = rolled_out(hook, step)
            assert [item.add_exp for item in configs] == [True] * 3
            assert [Guidance.of(item) for item in fresh] == [None] * 3, "nothing is known yet, so nothing was put in"
            hook.step_done(fresh, step)
        assert hook.wait(600)
        fresh, configs = rolled_out(hook, 3)
        assert [item.train_mode for item in configs] == ["discard"] * 3
        for item, exp in zip(fresh, configs, strict=True):
            guidance = Guidance.of(item)
            assert guidance.taken_out
            assert f"do {item.task_id} so" in exp.experience_list[0]
            assert item.messages[0]["content"] == f"please do {item.task_id}"
        metrics = hook.step_done(fresh, 3)
        assert metrics["guidance/guided_rollouts"] == 3.0
        assert metrics["guidance/update/made"] == 2.0
        assert metrics["guidance/outcome/guided"] == 1.0
    with GuidanceHook(config) as again:
        assert Guidance.of(rolled_out(again, 4)[0][0]) is not None


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    with GuidanceHook(GuidanceConfig(store={"path": str(tmp_path / "never")}, train_rollout_expmode="all")) as hook:
        fresh, configs = rolled_out(hook, 1)
        assert not any(setting.add_exp for setting in configs)
        assert hook.step_done(fresh, 1) == {}
        assert hook.begin([], 0.0)
    assert not (tmp_path / "never").exists()


def test_the_pool_can_be_filled_before_training() -> None:
    with GuidanceHook(GuidanceConfig(**ON, init_experience_before_training=True)) as hook:
        assert hook.begin([rollout("cup", "go kitchen")], 60)
        assert Guidance.of(rolled_out(hook, 1)[0][0]) is not None
    with GuidanceHook(GuidanceConfig(**ON)) as hook:
        assert hook.begin([rollout("cup", "go kitchen")], 60)
        assert Guidance.of(rolled_out(hook, 1)[0][0]) is None
        hook.validated([rollout("cup", "go kitchen")])
        assert hook.metrics()["guidance/update/submitted"] == 0.0


@pytest.fixture(scope="module", params=["digits", "bytes"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "digits":
        return make_tokenizer()
    return load_tokenizer(str(request.getfixturevalue("shared_fixtures") / "experience_pool_cmt" / "tokenizer"))


def rolled(messages: list[dict[str, Any]], first: int, tokenizer: Any) -> AgentTrajectory:
    """Return a tokenized rollout whose response begins with the model's turn ``first``."""
    template = ChatTemplate.of(tokenizer)
    made = with_tokens(AgentTrajectory(messages=messages, task_id="t", reward=Reward(outcome=1.0)), template)
    start = len(template.encode(template.render(messages[:first], True)))
    loss_mask = torch.cat([torch.zeros_like(made.loss_mask[:start]), made.loss_mask[start:]])
    mask = loss_mask[start:]
    return dataclasses.replace(
        made, loss_mask=loss_mask, response_start=start, response_mask=mask, old_log_probs=torch.full(mask.shape, -0.5)
    )


def said(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shots", [0, 2])
def test_tokens_of_a_discarded_rollout_hold_no_experience(rows: int, shots: int, tokenizer: Any) -> None:
    """Training tokens equal the chat template's tokens of the messages without the experience."""
    maker = LocalMaker()
    maker.add([Experience(when_to_use="say", content="say it twice", query="say one")])
    config = GuidanceConfig(enable_context_generator=True)
    prompt = [*said("say 3", "3")[:shots], *said("say one")]
    answer = said("", "1", "and two", "2")[1:]
    plain = [*prompt, *answer]
    with GuidanceHook(config, maker=maker, tokenizer=tokenizer) as hook:
        exp_config = TrajExpConfig(add_exp=True)
        made = rolled([*hook.context(prompt, exp_config), *answer], len(prompt), tokenizer)
        wanted = rolled(plain, len(prompt), tokenizer)
        if rows == 2:
            made, wanted = turns_as_rows(made), turns_as_rows(wanted)
        assert "say it twice" in tokenizer.decode(made.input_ids)
        done = hook.finished(made, exp_config)
        assert done.messages == plain
        assert done.old_log_probs is None
        for name in ("input_ids", "loss_mask", "response_mask"):
            assert torch.equal(getattr(done, name), getattr(wanted, name))
        assert done.response_start == wanted.response_start
        batch = build_batch(rows_of_plan([PlannedTask("t", 1, ())], [done], "shared"), 0)
        assert len(batch.tensors["input_ids"]) == rows
        assert torch.equal(batch.tensors["exp_mask"], batch.tensors["attention_mask"])
        other = dataclasses.replace(made, input_ids=made.input_ids + 1)
        with pytest.raises(InvalidTrajectoryError, match="does not begin with the"):
            hook.finished(other, exp_config)
        late = TrajExpConfig(add_exp=True)
        read = [*hook.context(plain[:-1], late), plain[-1]]
        with pytest.raises(InvalidTrajectoryError, match="does not begin with the"):
            hook.finished(rolled(read, len(prompt), tokenizer), late)  # inserted into the response
        assert hook.metrics()["guidance/discard_refused"] == 2
    other_template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    for arguments, error, reason in (
        ({"tokenizer": tokenizer, "chat_template_kwargs": other_template}, InvalidTrajectoryError, "does not begin"),
        ({}, ConfigurationError, "pass the tokenizer to GuidanceHook"),
    ):
        with GuidanceHook(config, maker=maker, **arguments) as hook, pytest.raises(error, match=reason):
            hook.finished(made, exp_config)


class Speaking:
    """A maker that returns preset experience."""

    def __init__(self, text: str) -> None:
        self.text = text

    def retrieve(self, query: str, k: int) -> Retrieved:
        return Retrieved(self.text, ("a\ud800",))

    def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


PIECES = ["<eos>", "<assistant>", "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<", ">", "|", "eos", " "]


@settings(max_examples=30, deadline=None)
@given(text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.text(st.characters())))
def test_experience_stays_inside_of_its_message_whatever_it_holds(tokenizer: Any, text: str) -> None:
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    plain = [{"role": "user", "content": "say one"}]

    def marks(messages: list[dict[str, Any]]) -> list[int]:
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        return [token for token in ids if token in special]

    with GuidanceHook(GuidanceConfig(enable_context_generator=True), maker=Speaking(text), tokenizer=tokenizer) as hook:
        config = TrajExpConfig(add_exp=True)
        read = hook.context(plain, config)
        figures = hook.metrics()
        assert len(config.insertions) == int(bool(text))
        assert figures["guidance/retrieve/cleaned"] == int(any("\ud800" <= character <= "\udfff" for character in text))
        assert marks(read) == marks(plain)
        assert (figures["guidance/retrieve/control_tokens"] > 0) == bool(special & set(ids_of(tokenizer, text)))
        assert hook.finished(AgentTrajectory(messages=read), config).messages == plain
        json.dumps([config.names, read], ensure_ascii=False).encode()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(unicode_of(text), add_special_tokens=False)["input_ids"]
    return ids


def test_an_option_without_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), GuidanceHook(GuidanceConfig(enable_summarizer=True)):
        pass
    assert "enable_summarizer has no effect" in caplog.text
