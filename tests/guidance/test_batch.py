"""Masks of guided rows: only where something was put in, after replay, and without log-probs of another prompt."""

from __future__ import annotations

from typing import Literal

import torch

from trainer_hooks.batch import build_batch
from trainer_hooks.masks import replace_recorded_old_log_probs
from trainer_hooks.plan import PlannedTask, rows_of_plan
from trajstore.guidance import Guidance, Insertion, with_guidance
from trajstore.trajectory import AgentTrajectory


def rollout(name: str, mode: Literal["keep", "discard"] | None = None) -> AgentTrajectory:
    """Two prompt tokens; model, environment, model."""
    trajectory = AgentTrajectory(
        input_ids=torch.arange(5),
        loss_mask=torch.tensor([0, 0, 1, 0, 1]),
        response_start=2,
        old_log_probs=torch.full((3,), -0.5),
        task_id="task",
        rollout_id=name,
    )
    return with_guidance(trajectory, None if mode is None else Guidance(mode, ("1",), (Insertion(0, "tip"),)))


def test_masks_and_recorded_log_probs_of_every_kind_of_row() -> None:
    fresh = [rollout("plain"), rollout("kept", "keep"), rollout("discarded", "discard")]
    histories = (rollout("replayed"), rollout("replayed, once guided", "discard"))
    rows = rows_of_plan([PlannedTask("task", 3, histories)], fresh, "shared")
    batch = build_batch(rows, 0, prompt_length=3, response_length=4).tensors
    assert batch["exp_mask"].tolist() == [
        [0] * 7,
        [0] * 7,
        [0, 1, 1, 1, 1, 1, 0],  # prompt and response, not the padding
        [0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 1, 0, 1, 0],  # replay goes first
    ]
    recorded = [[True, True, True, False]] * 2 + [[False] * 4] + [[True, True, True, False]] * 2
    assert batch["recorded_mask"].tolist() == recorded
    current = torch.full((5, 4), -2.0)
    old = replace_recorded_old_log_probs(
        current, batch["recorded_old_log_probs"], batch["recorded_mask"], batch["exp_mask"]
    )
    assert torch.equal(old[:3], current[:3]), "a discarded row's ratio begins at 1"
    assert old[3, [0, 2]].tolist() == [-0.5, -0.5]


def test_extras_say_how_a_row_was_made() -> None:
    rows = rows_of_plan([PlannedTask("task", 2, ())], [rollout("a"), rollout("b", "discard")], "shared")
    extras = build_batch(rows, 0).non_tensors["extras"]
    assert [(one["add_exp"], one["task_train_expmode"]) for one in extras] == [(False, "keep"), (True, "discard")]
