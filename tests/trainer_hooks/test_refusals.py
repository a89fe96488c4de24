"""Reasons for refusing rollouts of a training step."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.examples.test_hook import TASKS, N, begin_step, hook, log_probs_of, roll_out
from tests.examples.test_hook import hook as make_hook
from tests.replay.test_refusals import ALL_REFUSED, MALFORMED, rollout
from trainer_hooks.batch import build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance import Guidance, put_in
from trainer_hooks.guidance.context import GUIDANCE
from trainer_hooks.hook import ReplayHook
from trainer_hooks.plan import PlannedTask, rows_of_plan
from trainer_hooks.replay import PoolRules
from trainer_hooks.replay.notices import why_nothing
from trainer_hooks.replay.prompts import prompt_of, prompt_of_row
from trainer_hooks.replay.state import PoolState
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, Reward


def reasons(figures: dict[str, float]) -> dict[str, float]:
    begin = "experience_replay/refused/"
    return {name.removeprefix(begin): value for name, value in figures.items() if name.startswith(begin) and value}


def test_the_figures_of_a_step_with_malformed_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    replay = hook()
    replay.tasks_chosen(["a"], 0.0, 1)
    broken = [rollout(**ALL_REFUSED[case][0], rollout_id=case) for case in MALFORMED]
    done = [*broken, rollout(rollout_id="whole", entropy=0.5), rollout(outcome=0.0, rollout_id="failed", entropy=1.5)]
    figures = replay.rollouts_done(done, [False] * len(done), [1] * len(done))
    assert reasons(figures) == {"malformed": float(len(broken))}
    assert figures["experience_replay/refused_share"] == len(broken) / (len(broken) + 1)
    assert figures["experience_replay/pool_trajectories"] == 1.0
    assert figures["experience_replay/fresh_score_mean"] == (len(broken) + 1) / len(done)
    assert all(math.isfinite(value) for value in figures.values())
    with pytest.raises(InvalidTrajectoryError, match="was passed already"):
        replay.rollouts_done(done, [False] * len(done), [1] * len(done))


@pytest.mark.parametrize("name", ["old_log_probs", "entropys"])
def test_what_does_not_fit_the_batch_is_refused_before_anything_is_noted(name: str) -> None:
    replay = hook()
    batch, fresh, _ = begin_step(replay, 1, TASKS[:1], successes=1)
    fine = torch.full(batch.tensors["responses"].shape, -2.0)
    for wrong in (fine[:, 1:], torch.cat([fine, fine], dim=1), fine[1:], fine[0]):
        with pytest.raises(ConfigurationError, match=rf"{name}: shape .* must be"):
            replay.step_done(batch, fresh, **{"old_log_probs": fine, "entropys": -fine, name: wrong})
    manager = replay.manager
    assert (manager.difficulty2task_dict, manager.refused, len(manager)) == ({}, {}, 0)
    assert not reasons(replay.step_done(batch, fresh, fine, -fine))


# -- Requested rollouts that never arrived, and the final warning of a run that accepted none --


@pytest.mark.parametrize(("asked", "solved"), [(None, False), (dict.fromkeys(TASKS, N - 1), True)])
def test_a_task_whose_rollouts_crashed_is_not_solved(asked: dict[str, int] | None, solved: bool) -> None:
    """One of four crashed, the others succeeded: unknown unless the trainer requested three."""
    with make_hook() as replay:
        planned = replay.before_rollout(replay.tasks_chosen(TASKS, 0.0, 1))
        came = [PlannedTask(task_plan.task, task_plan.fresh_rollouts - 1, ()) for task_plan in planned]
        fresh = roll_out(came, 1, successes=N)
        batch = build_batch(rows_of_plan(came, fresh, "shared"), pad_token_id=0)
        current = log_probs_of(batch, 1)
        replay.step_done(batch, fresh, current, torch.ones_like(current), asked)
        assert replay.manager.skip_uid_set == (set(TASKS) if solved else set())


def test_a_run_whose_steps_were_refused_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_hook() as replay:
        batch, fresh, _ = begin_step(replay, 1)
        with pytest.raises(ConfigurationError, match="old_log_probs"):
            replay.step_done(batch, fresh, torch.zeros(1, 1), torch.zeros(1, 1))
    assert "no step was done" in caplog.text
    assert "no rollout had an outcome" not in caplog.text


def test_a_pool_whose_tasks_are_solved_does_not_miss_successes() -> None:
    reason = why_nothing(PoolState(skip={"a": None}), PoolRules(n_rollout=4), 3, {})
    assert "1 task is solved" in reason
    assert "no success" not in reason


# -- Histories must answer the row's prompt --


def asked(first: int, name: str, outcome: float = 1.0) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.tensor([first, 1, 2 + len(name)]),
        loss_mask=torch.tensor([0, 0, 1]),
        response_start=2,
        old_log_probs=torch.tensor([-0.5]),
        reward=Reward(outcome=outcome),
        task_id="a",
        rollout_id=name,
    )


@pytest.mark.parametrize("replaced", [True, False])
def test_histories_of_another_prompt_are_counted_replaced_and_drawn_no_more(replaced: bool) -> None:
    config = ExperienceReplayConfig(enable=True, exp_ratio=1.0, exp_select_mode="random")
    with ReplayHook(config, n_rollout=3, get_task=str) as hook:
        made = [asked(7, "old"), asked(7, "failed", 0.0), asked(7, "failed too", 0.0)]
        assert hook.admit(made) == {"experience_replay/refused_share": 0.0}
        plan = hook.before_rollout(hook.tasks_chosen(["a"], 0.5, 1))
        assert [len(item.histories) for item in plan] == [1]
        fresh = [asked(8, "x"), asked(8, "y", 0.0)]
        assert hook.replacements(plan, fresh) == [PlannedTask("a", 1, ())]
        if replaced:
            fresh.append(asked(8, "third"))
        rows = hook.batch_rows(plan, fresh)
        assert [row.trajectory.rollout_id for row in rows] == [one.rollout_id for one in fresh]
        assert not any(row.is_experience_replay for row in rows), "the row asks something else by now"
        batch = build_batch(rows, pad_token_id=0)
        log_probs = torch.full(batch.tensors["responses"].shape, -0.5)
        figures = hook.step_done(batch, fresh, log_probs, log_probs)
        assert figures["experience_replay/histories_refused/other_prompt"] == 1.0
        assert hook.manager.difficulty2task_dict == {2: ("a",)}
        plan = hook.before_rollout(hook.tasks_chosen(["a"], 0.5, 2))
        assert [history.rollout_id for history in plan[0].histories] in (["x"], ["third"])
        assert [item.task_id for item in hook.manager.never_drawn()["other_prompts"]] == ["a"]


TASK_PROMPTS: dict[str, Callable[[str], Any] | None] = {
    "of the task alone": lambda task: [{"role": "user", "content": task}],
    "empty": lambda task: [],
    "of the rollouts, which vary": None,
}


@pytest.mark.parametrize("case", TASK_PROMPTS)
def test_an_agent_whose_prompt_has_a_clock_replays(case: str) -> None:
    """Without ``task_prompt``, two rollouts of this run show that a task's prompt varies."""
    config = ExperienceReplayConfig(enable=True, exp_ratio=1.0, max_trajectories_per_task=2)
    with ReplayHook(config, n_rollout=3, get_task=str, task_prompt=TASK_PROMPTS[case]) as hook:
        for step in range(1, 6):
            plan = hook.before_rollout(hook.tasks_chosen(["a"], 0.5, step))
            (planned,) = plan
            observed = {"role": "user", "content": f"It is {step} o'clock."}
            fresh = [
                dataclasses.replace(
                    asked(10 + step, "x" * (10 * step + number), float(number == 0)),
                    messages=[{"role": "user", "content": "a"}, observed, ANSWER],
                )
                for number in range(planned.fresh_rollouts)
            ]
            assert hook.replacements(plan, fresh) == []
            rows = hook.batch_rows(plan, fresh)
            assert len(rows) == 3
            assert [row.is_experience_replay for row in rows].count(True) == (step > 1)
            batch = build_batch(rows, pad_token_id=0)
            log_probs = torch.full(batch.tensors["responses"].shape, -0.5)
            figures = hook.step_done(batch, fresh, log_probs, log_probs + 1.0 / step)
            assert figures["experience_replay/other_prompts"] == 0.0
            assert figures["experience_replay/histories_refused/other_prompt"] == 0.0
        held = {len(one.rollout_id) for one in hook.manager.task2trajectories["a"]}
        assert held == {40, 50}, "the lowest entropies, as for any task"


PROMPT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2?"}]
SHOWN, INSERTION = put_in(PROMPT, "tip: fingers\n")
ANSWER = {"role": "assistant", "content": "4", "author": "llm"}
KEPT = Guidance("keep", ("7",), (INSERTION,), False).to_json()


@pytest.mark.parametrize(
    ("messages", "metadata", "differs"),
    [
        (PROMPT, {}, False),
        ([*PROMPT, ANSWER], {}, False),
        ([*PROMPT, ANSWER, {"role": "user", "content": "sure?"}, ANSWER], {}, False),
        ([], {}, False),
        (SHOWN, {GUIDANCE: KEPT}, False),
        (SHOWN, {}, True),
        (PROMPT[1:], {}, True),
        (PROMPT[:1], {}, True),
        ([PROMPT[0], {"role": "user", "content": "2 + 3?"}, ANSWER], {}, True),
    ],
)
def test_a_history_answers_a_row_if_its_conversation_begins_with_the_prompt(
    messages: list[dict[str, Any]], metadata: dict[str, Any], differs: bool
) -> None:
    held = prompt_of(AgentTrajectory(messages=messages, metadata=metadata))
    assert held.differs(prompt_of_row(PROMPT)) == differs
    assert not held.differs(prompt_of_row([])), "nothing is known of the row"
