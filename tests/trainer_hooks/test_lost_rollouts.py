"""Rollouts that were asked for and never came, and what a run that took none in says at its end."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.reference.test_hook import TASKS, N, log_probs_of, roll_out
from tests.reference.test_hook import hook as make_hook
from trainer_hooks.batch import build_batch
from trainer_hooks.plan import PlannedTask, rows_of_plan
from trajstore.errors import ConfigurationError
from trajstore.experience import PoolRules
from trajstore.experience.diagnosis import why_nothing
from trajstore.experience.journal import PoolState


@pytest.mark.parametrize(("asked", "solved"), [(None, False), (dict.fromkeys(TASKS, N - 1), True)])
def test_a_task_whose_rollouts_crashed_is_not_solved(asked: dict[str, int] | None, solved: bool) -> None:
    """One of four crashed, the others succeeded: unknown, unless the trainer says that it asked for three."""
    with make_hook() as replay:
        planned = replay.before_rollout(replay.tasks_chosen(TASKS, 0.0, 1))
        came = [PlannedTask(one.task, one.fresh_rollouts - 1, ()) for one in planned]
        fresh = roll_out(came, 1, successes=N)
        batch = build_batch(rows_of_plan(came, fresh, "shared"), pad_token_id=0)
        current = log_probs_of(batch, 1)
        replay.step_done(batch, fresh, current, torch.ones_like(current), asked)
        assert replay.manager is not None
        assert replay.manager.skip_uid_set == (set(TASKS) if solved else set())


def test_a_run_whose_steps_were_refused_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_hook() as replay:
        fresh = roll_out(replay.before_rollout(replay.tasks_chosen(TASKS, 0.0, 1)), 1)
        batch = build_batch(replay.batch_rows([PlannedTask(task, N, ()) for task in TASKS], fresh), pad_token_id=0)
        with pytest.raises(ConfigurationError, match="old_log_probs"):
            replay.step_done(batch, fresh, torch.zeros(1, 1), torch.zeros(1, 1))
    assert "no step was done" in caplog.text
    assert "no rollout had an outcome" not in caplog.text


def test_a_pool_whose_tasks_are_solved_does_not_miss_successes() -> None:
    reason = why_nothing(PoolState(skip={"a": None}), PoolRules(n_rollout=4), 3, {})
    assert "1 tasks are solved" in reason
    assert "no success" not in reason
