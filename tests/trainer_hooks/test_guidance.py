"""Configuration of guidance, and the calls that any loop makes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.guidance.rollouts import rollout
from trainer_hooks.guidance import GuidanceHook
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.plan import PlannedTask
from trajstore.errors import ConfigurationError
from trajstore.guidance import Guidance, TrajExpConfig
from trajstore.trajectory import AgentTrajectory, Reward


def test_both_sets_of_names_are_understood() -> None:
    today = {
        "exp_manager": {
            "train_rollout_mode": "mixed",
            "val_rollout_mode": "all",
            "rollout_ratio": 0.25,
            "train_sample_mode": "hybrid",
            "train_sample_keepratio": 0.5,
            "init_exp_before_training": True,
            "init_exp_only": True,
            "reme": {"base_url": "http://127.0.0.1:8001", "retrieve_top_k": 5, "summary_batch_size": 4},
            "experience_replay": {"enable": True},
            "recording": {"enable": False},
        }
    }
    source = {
        "experience_maker": {"base_url": "http://127.0.0.1:8001", "retrieve_top_k": 5, "summary_batch_size": 4},
        "exp_manager": {
            "train_rollout_expmode": "mixed",
            "val_rollout_expmode": "all",
            "rollout_expratio": 0.25,
            "train_sample_expmode": "hybrid",
            "train_sample_keepratio": 0.5,
            "init_experience_before_training": True,
            "init_experience_only": True,
        },
    }
    assert GuidanceConfig.from_config(today) == GuidanceConfig.from_config(source)
    assert GuidanceConfig.from_config({}) == GuidanceConfig()


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ({"exp_manager": {"rollout_ratio": 0.1, "rollout_expratio": 0.1}}, ["is the same option as exp_manager"]),
        (
            {"experience_maker": {"base_url": "http://a"}, "exp_manager": {"reme": {"base_url": "http://a"}}},
            ["same opt"],
        ),
        ({"exp_manager": {"rolout_ratio": 0.1}}, ["exp_manager.rolout_ratio: unknown key; known are"]),
        ({"experience_maker": {"rollout_ratio": 0.1}}, ["experience_maker.rollout_ratio: unknown key"]),
        (
            {"exp_manager": {"train_rollout_mode": "some", "rollout_ratio": 2}},
            [
                "exp_manager.train_rollout_mode: 'some', must be one of woexp, all, mixed",
                "exp_manager.rollout_ratio: 2",
            ],
        ),
        ({"exp_manager": {"train_sample_mode": "keep"}}, ["must be one of allkeep, alldiscard, hybrid"]),
        ({"exp_manager": {"experience_template": "no place"}}, ["a text with one {}"]),
        ({"exp_manager": {"reme": {"base_url": "localhost"}}}, ["exp_manager.reme.base_url: 'localhost'"]),
        ({"experience_maker": {"updated_freq": 2}}, ["0 without enable_summarizer"]),
        ({"experience_maker": {"enable_summarizer": "yes"}}, ["must be true or false"]),
        ({"experience_maker": {"store": {"path": "x", "size": 3}}}, ["experience_maker.store.size: unknown key"]),
        ({"experience_maker": {"store": {"path": "x", "capacity": 3}}}, ["whole number of at least 256"]),
        ({"exp_manager": {"init_exp_only": True}}, ["false without init_experience_before_training"]),
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
            assert [one.add_exp for one in configs] == [True] * 3
            assert [Guidance.of(one) for one in fresh] == [None] * 3, "nothing is known yet, so nothing was put in"
            hook.step_done(fresh, step)
        assert hook.wait(60)
        fresh, configs = rolled_out(hook, 3)
        assert [one.train_mode for one in configs] == ["discard"] * 3
        for one, exp in zip(fresh, configs, strict=True):
            guidance = Guidance.of(one)
            assert guidance is not None
            assert guidance.taken_out
            assert f"do {one.task_id} so" in exp.experience_list[0]
            assert one.messages[0]["content"] == f"please do {one.task_id}"
        metrics = hook.step_done(fresh, 3)
        assert metrics["guidance/guided_rollouts"] == 3.0
        assert metrics["guidance/update/made"] == 2.0
        assert metrics["guidance/outcome/guided"] == 1.0
    with GuidanceHook(config) as again:
        assert again.worth.worth
        assert Guidance.of(rolled_out(again, 4)[0][0]) is not None


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    with GuidanceHook(GuidanceConfig(store={"path": str(tmp_path / "never")}, train_rollout_expmode="all")) as hook:
        fresh, configs = rolled_out(hook, 1)
        assert not any(one.add_exp for one in configs)
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


def test_an_option_without_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), GuidanceHook(GuidanceConfig(enable_summarizer=True)):
        pass
    assert "enable_summarizer has no effect" in caplog.text
