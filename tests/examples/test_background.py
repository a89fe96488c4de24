"""Background drawing returns the same histories as synchronous drawing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.grpo.checkpoint import load_checkpoint, save_checkpoint
from tests.examples.runs import SORT, Train
from tests.examples.test_hook import TASKS, N, do_step, hook, roll_out
from tests.replay.conftest import view
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trajstore.errors import StoreWriteError
from trajstore.trajectory import AgentTrajectory


@pytest.mark.parametrize(
    "options",
    [
        {"use_current_policy_entropy": True, "task_sampling": "similar"},
        pytest.param(
            {"exp_select_mode": "random", "policy_versions": "spread", "in_turns": True}, marks=pytest.mark.campaign
        ),
    ],
    ids=["scored, similar", "spread, in turns"],
)
def test_a_run_with_histories_drawn_in_the_background_equals_one_without(
    make: Train, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"experience_rbound": None, "offpolicy_trajectories_per_task": 2, **options}
    whole = make(SORT, **options)
    whole.train()
    first = make(SORT, **options, prepare_in_background=True, store={"path": str(tmp_path / "pool")})
    half = SORT.steps // 2
    first.train(until=half)
    saved = save_checkpoint(first, tmp_path / "checkpoints")
    first.train(until=half + 1)
    first.close()
    second = make(SORT, **options, prepare_in_background=True, store={"path": str(tmp_path / "pool")})
    load_checkpoint(second, saved)
    assert second.train() == whole.curve
    assert all(whole.model.state_dict()[name].equal(value) for name, value in second.model.state_dict().items())
    assert view(second.hook.manager) == view(whole.hook.manager)
    same = ("experience_tasks", "replayed_rows", "fresh_score_mean", "age_mean")
    for name in (f"experience_replay/{metric}" for metric in same):
        assert second.metrics.get(name) == whole.metrics.get(name), name
    assert "experience_replay/seconds/histories_in_background" in second.metrics
    if options.get("task_sampling") == "similar":
        assert second.metrics["experience_replay/similar_tasks"] > 0


def gated(**options: Any) -> tuple[ReplayHook[str], threading.Event]:
    """A hook that draws histories only after the event."""
    gate = threading.Event()

    def entropy(trajectories: Sequence[AgentTrajectory]) -> list[float]:
        assert gate.wait(600)
        return [1.0] * len(trajectories)

    values: dict[str, Any] = {
        "enable": True,
        "exp_ratio": 1.0,
        "prepare_in_background": True,
        "offpolicy_trajectories_per_task": 1,
    }
    config = ExperienceReplayConfig(**values | options)
    return ReplayHook(config, n_rollout=N, get_task=str, current_entropy=entropy), gate


def test_the_rollouts_do_not_wait_and_all_that_needs_the_histories_does() -> None:
    replay, gate = gated()
    with replay:
        gate.set()
        do_step(replay, 1)
        gate.clear()
        plan = replay.before_rollout(replay.tasks_chosen(TASKS, 0.5, 2))
        assert [(item.fresh_rollouts, len(item.histories), bool(item.histories)) for item in plan] == [
            (N - 1, 1, True)
        ] * 4
        fresh = roll_out(plan, 2)  # before histories are drawn
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        rows = replay.batch_rows(plan, fresh)
        assert gate.is_set(), "it waited"
        assert len(rows) == N * len(TASKS)
        assert [item.task_id for item in plan[0].histories[:1]] == [plan[0].task]
        timer.join()


def test_the_function_that_scores_may_look_at_the_hook() -> None:
    sizes: list[int] = []

    def entropy(trajectories: Sequence[AgentTrajectory]) -> list[float]:
        sizes.append(len(replay.manager))
        return [1.0] * len(trajectories)

    config = ExperienceReplayConfig(enable=True, prepare_in_background=True, offpolicy_trajectories_per_task=1)
    with ReplayHook(config, n_rollout=N, get_task=str, current_entropy=entropy) as replay:
        do_step(replay, 1)
        do_step(replay, 2)
    assert sizes


def test_the_end_of_a_run_waits_for_what_is_under_way_and_tells_of_its_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, gate = gated()
    gate.set()
    do_step(replay, 1)

    def broken(tasks: Any) -> Any:
        raise StoreWriteError("no disk")

    monkeypatch.setattr(replay._made.collate, "get_histories", broken)
    plan = replay.before_rollout(replay.tasks_chosen(TASKS, 0.5, 2))
    with pytest.raises(StoreWriteError, match="no disk"):
        replay.batch_rows(plan, roll_out(plan, 2))
    replay.before_rollout(replay.tasks_chosen(TASKS, 0.5, 2))
    replay.close()
    assert "under way at the end failed" in caplog.text
    replay.close()


def test_a_damaged_record_makes_its_task_a_row_shorter(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = hook(exp_ratio=1.0, prepare_in_background=True, use_current_policy_entropy=False, save_filter="best")
    do_step(replay, 1)
    manager, made = replay.manager, replay._made
    drawing = made.collate.get_histories

    def after_a_loss(tasks: Any) -> Any:
        entries = manager._state.entries["a"]
        manager._ledger.store.evict([entry.trajectory_id for entry in entries])
        return drawing(tasks)

    monkeypatch.setattr(made.collate, "get_histories", after_a_loss)
    caplog.set_level(logging.INFO)
    plan = replay.before_rollout(replay.tasks_chosen(TASKS, 0.5, 2))
    assert len(replay.batch_rows(plan, roll_out(plan, 2))) == N * len(TASKS) - 1
    assert "no longer keeps a trajectory of task a" in caplog.text
    replay.close()
