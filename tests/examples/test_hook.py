"""``ReplayHook`` in a minimal training loop without a model."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_hooks.batch import Batch, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.plan import MixedTasks, PlannedTask
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, Reward

N = 4
TASKS = ["a", "b", "c", "d"]


def hook(**options: Any) -> ReplayHook[str]:
    config = ExperienceReplayConfig(**{"enable": True, **options})
    return ReplayHook(config, n_rollout=N, get_task=lambda name: name if name in TASKS else None)


def roll_out(plan: list[PlannedTask[str]], step: int, successes: int = 2) -> list[AgentTrajectory]:
    """Return rollouts with ``successes`` per task; prompts of 2 tokens, responses of 3 to 5."""
    made = []
    for planned in plan:
        for number in range(planned.fresh_rollouts):
            response = 3 + number % 3
            ids = torch.tensor([1, 2, *(10 * step + number for _ in range(response))])
            mask = torch.tensor([0, 0, 1, 0, *[1] * (response - 2)])
            made.append(
                AgentTrajectory(
                    input_ids=ids,
                    loss_mask=mask,
                    response_start=2,
                    reward=Reward(outcome=float(number < successes)),
                    task_id=planned.task,
                    rollout_id=f"{step}/{number}",
                )
            )
    return made


def log_probs_of(batch: Batch, step: int) -> Tensor:
    """Return log-probs that are unique per step, row and position."""
    rows, width = batch.tensors["responses"].shape
    return -(step + torch.arange(rows * width).reshape(rows, width) / 1000.0)


def begin_step(
    replay: ReplayHook[str], step: int, tasks: list[str] | None = None, successes: int = 2
) -> tuple[Batch, list[AgentTrajectory], Tensor]:
    """Run a step up to the policy pass; return batch, rollouts and the policy's output."""
    plan = replay.before_rollout(replay.tasks_chosen(tasks or TASKS, step / 100, step))
    fresh = roll_out(plan, step, successes)
    batch = build_batch(replay.batch_rows(plan, fresh), pad_token_id=0)
    return batch, fresh, log_probs_of(batch, step)


def do_step(
    replay: ReplayHook[str], step: int, tasks: list[str] | None = None, successes: int = 2
) -> tuple[Batch, list[AgentTrajectory], Tensor, dict[str, float]]:
    batch, fresh, current = begin_step(replay, step, tasks, successes)
    old = replay.log_probs_computed(batch, current)
    metrics = replay.step_done(batch, fresh, current, torch.full_like(current, 0.5))
    return batch, fresh, old, metrics


@pytest.mark.parametrize("grouping", ["shared", "separate"])
def test_every_task_has_n_rows_and_groups_are_as_configured(grouping: str) -> None:
    replay = hook(group_offpolicy=grouping, exp_ratio=1.0, offpolicy_trajectories_per_task=2)
    do_step(replay, 1)
    batch, *_ = do_step(replay, 2)
    groups = batch.tensors["group_ids"]
    replayed = torch.tensor([extras["is_experience_replay"] for extras in batch.non_tensors["extras"]])
    assert replayed.sum() == 8
    for task in TASKS:
        rows = torch.from_numpy(batch.non_tensors["task_ids"] == task)
        assert rows.sum() == N
        if grouping == "shared":
            assert len(set(groups[rows].tolist())) == 1
        else:
            assert len(set(groups[rows & ~replayed].tolist())) == 1
    if grouping == "separate":
        assert len(set(groups[replayed].tolist())) == 8
        assert not set(groups[replayed].tolist()) & set(groups[~replayed].tolist())


def test_switched_off_the_calls_hand_back_what_they_were_given() -> None:
    replay = hook(enable=False)
    mixed = replay.tasks_chosen(TASKS, 1.0, 1)
    assert mixed == MixedTasks((), tuple(TASKS))
    assert replay.before_rollout(mixed) == [PlannedTask(task, N, ()) for task in TASKS]
    batch, _, old, metrics = do_step(replay, 1)
    assert old.equal(log_probs_of(batch, 1))
    assert metrics == {}
    assert replay.manager is None
    assert replay.state_dict() == {}
    replay.load_state_dict({})
    replay.close()


def test_figures_of_the_loss_are_told_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    replay = hook(exp_ratio=1.0, offpolicy_trajectories_per_task=2)
    do_step(replay, 1, successes=1)
    batch, fresh, current = begin_step(replay, 4)
    old = replay.log_probs_computed(batch, current)
    rows = list(range(len(old)))[::-1]
    mask = batch.tensors["response_mask"][rows]
    advantages = torch.ones(mask.shape)
    loss = het_compute_token_on_off_policy_loss(
        old[rows],
        old[rows] + 2.5,
        advantages,
        mask,
        batch.tensors["exp_mask"][rows, -mask.shape[1] :],
        cliprange=0.2,
        **replay.loss_options,
    )
    with caplog.at_level(logging.WARNING):
        replay.loss_computed(batch, rows, loss, advantages)
        metrics = replay.step_done(batch, fresh, current, torch.full_like(current, 0.5))
        replay.loss_computed(batch, rows, loss, advantages)
        replay.step_done(batch, [], current, torch.full_like(current, 0.5))
    assert caplog.text.count("have mean 12.2") == 1
    assert metrics["experience_replay/off_pg_clipfrac"] == 1.0
    assert metrics["experience_replay/off_effective_sample_size"] == pytest.approx(1.0)
    assert metrics["experience_replay/on_ratio_mean"] == pytest.approx(12.18, abs=0.01)
    assert metrics["experience_replay/seconds/step_done"] > 0


def test_wrong_calls_are_named() -> None:
    replay = hook()
    plan = replay.before_rollout(replay.tasks_chosen(TASKS, 0.0, 1))
    fresh = roll_out(plan, step=1)
    with pytest.raises(ConfigurationError, match="15 rollouts, the plan asks for 16"):
        replay.batch_rows(plan, fresh[1:])
    with pytest.raises(ConfigurationError, match=r"is of task .* the plan has"):
        replay.batch_rows(plan, fresh[::-1])
    batch = build_batch(replay.batch_rows(plan, fresh), pad_token_id=0)
    values = log_probs_of(batch, 1)
    stranger = roll_out([PlannedTask("z", 1, ())], step=1)
    with pytest.raises(InvalidTrajectoryError, match="'z'"):
        replay.step_done(batch, [*fresh[1:], *stranger], values, values)
    fresh[1].rollout_id = fresh[0].rollout_id
    twice = build_batch(replay.batch_rows(plan, fresh), pad_token_id=0)
    with pytest.raises(InvalidTrajectoryError, match="twice among the fresh rows of task 'a'"):
        replay.step_done(twice, fresh, values, values)
    with pytest.raises(ConfigurationError, match="offpolicy_trajectories_per_task"):
        hook(offpolicy_trajectories_per_task=N)


def with_outcomes(replay: ReplayHook[str], step: int, outcome: float) -> dict[str, float]:
    """Run a step in which all rollouts have the same outcome."""
    batch, fresh, current = begin_step(replay, step)
    for rollout in fresh:
        rollout.reward = Reward(outcome=outcome)
    return replay.step_done(batch, fresh, current, torch.full_like(current, 0.5))


def test_figures_of_fresh_rollouts_are_without_replayed_ones() -> None:
    replay = hook(exp_ratio=1.0, offpolicy_trajectories_per_task=2)
    do_step(replay, 1, successes=1)
    _, fresh, _, metrics = do_step(replay, 2, successes=1)
    assert all(rollout.old_log_probs is None for rollout in fresh), "given rollouts are unchanged"
    figures = {name.removeprefix("experience_replay/"): value for name, value in metrics.items()}
    assert (figures["fresh_score_mean"], figures["fresh_success_rate"]) == (4 / 12, 4 / 12)
    assert figures["fresh_response_length_mean"] == 4.0
    assert figures["fresh_entropy_mean"] == pytest.approx(0.5)


def test_replay_that_yields_nothing_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    replay = hook()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 31):
            with_outcomes(replay, step, 0.9)
    warnings = [message for message in caplog.messages if "nothing to replay" in message]
    assert len(warnings) == 1
    assert "an outcome must reach success_threshold = 1" in warnings[0]
    assert "the best outcome so far is 0.9" in warnings[0]
    caplog.clear()
    short = hook()
    with_outcomes(short, 1, float("nan"))
    with caplog.at_level(logging.WARNING):
        short.close()
    assert "nothing was replayed in this run" in caplog.text
    assert "16 were refused as outcome_not_finite" in caplog.text


def test_tasks_that_still_wait_at_the_end_of_a_run_are_told(caplog: pytest.LogCaptureFixture) -> None:
    more = [f"more{number}" for number in range(4)]
    config = ExperienceReplayConfig(enable=True)
    replay: ReplayHook[str] = ReplayHook(config, n_rollout=N, get_task=str)
    do_step(replay, 1)
    *_, metrics = do_step(replay, 2, tasks=more)
    assert metrics["experience_replay/waiting_tasks"] == 2.0
    with caplog.at_level(logging.WARNING):
        replay.close()
    assert "2 tasks were displaced by history and not drawn again by the end of this run (more2, more3)" in caplog.text


def test_options_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hook(save_filter="positive")
    assert "save_filter: positive lets every outcome above 0 in" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        replay = hook(replay_start_ratio=0.02)
        assert not caplog.messages
        for step in (1, 2, 3):
            do_step(replay, step)
    (message,) = caplog.messages
    assert "before training progress 0.02 (replay_start_ratio); it is 0.01 now" in message


def test_the_batchs_own_mask_fits_the_loss() -> None:
    replay = hook(exp_ratio=1.0, offpolicy_trajectories_per_task=2)
    do_step(replay, 1)
    batch, _, old, _ = do_step(replay, 2)
    tensors, width = batch.tensors, old.shape[1]
    assert tensors["exp_mask"].shape[1] > width
    arguments = (old, old + 0.5, torch.ones_like(old), tensors["response_mask"])
    whole = het_compute_token_on_off_policy_loss(*arguments, tensors["exp_mask"], cliprange=0.2, **replay.loss_options)
    part = het_compute_token_on_off_policy_loss(
        *arguments, tensors["exp_mask"][:, -width:], cliprange=0.2, **replay.loss_options
    )
    assert all(whole[name].equal(value) for name, value in part.items())
    entropy, kl = replay.regularizer_masks(batch)
    assert entropy.equal(tensors["response_mask"])
    assert not (kl * tensors["exp_mask"][:, -width:]).any()
    assert kl.sum() + (tensors["exp_mask"][:, -width:] != 0).sum() == entropy.sum()
