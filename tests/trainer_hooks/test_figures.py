"""The figures that ``ReplayHook`` hands out, and what it says at the end of a run."""

from __future__ import annotations

import dataclasses
import logging

import orjson
import pytest

from tests.reference.test_hook import TASKS, do_step, hook, roll_out
from trainer_hooks.plan import PlannedTask


def test_a_run_that_ends_when_its_pool_is_filled_says_that_it_was_too_short(caplog: pytest.LogCaptureFixture) -> None:
    replay = hook()
    do_step(replay, 1)
    with caplog.at_level(logging.WARNING):
        replay.close()
    assert "since its last step it has 4, which the next step would replay. The run was too short" in caplog.text
    assert "no success" not in caplog.text


def test_starving_buckets_are_counted_on_after_a_resume() -> None:
    """A run that is cut after fifteen steps says in the twentieth what one without a cut says."""
    name = "experience_replay/starving_buckets"
    replay = hook(replay_difficulty=1)
    do_step(replay, 1, tasks=["a"], successes=2)
    for step in range(2, 16):
        *_, metrics = do_step(replay, step, tasks=["b", "c"], successes=1)
        assert name not in metrics
    assert replay.manager is not None
    saved = orjson.dumps(replay.manager.state_dict(), option=orjson.OPT_NON_STR_KEYS)  # as verl's checkpoints have it
    resumed = hook(replay_difficulty=1)
    resumed.resume(orjson.loads(saved), 15)
    for step in range(16, 21):
        assert name not in metrics
        *_, metrics = do_step(resumed, step, tasks=["b", "c"], successes=1)
    assert metrics[name] == 1.0
    old = {key: value for key, value in replay.state_dict().items() if key != "draws"}
    hook().resume(old, 15)  # a cut of an earlier version


def test_no_bucket_starves_before_replay_begins() -> None:
    replay = hook(replay_start_ratio=0.9)
    for step in range(1, 30):
        *_, metrics = do_step(replay, step)
    assert "experience_replay/starving_buckets" not in metrics


def test_demonstrations_are_not_rows_of_unknown_age() -> None:
    replay = hook()
    assert replay.manager is not None
    made = roll_out([PlannedTask(task, 1, ()) for task in TASKS], step=0)
    replay.manager.seed([dataclasses.replace(one, metadata={"demonstration": True}) for one in made])
    *_, metrics = do_step(replay, 1)
    assert metrics["experience_replay/demonstration_rows"] == metrics["experience_replay/replayed_rows"] == 2.0
    assert metrics["experience_replay/age_unknown_rows"] == 0.0
