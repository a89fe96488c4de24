"""Rollouts that are certainly wrong are kept, with a warning when they are added."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer

NAN, INF = float("nan"), float("inf")
MOST = [(torch.bfloat16, 0.1), (torch.float16, 0.1), (torch.float32, 1e-3), (torch.float64, 1e-3)]
"""Largest value that a log-probability may have by rounding, by dtype."""


def beside(dtype: torch.dtype, most: float, to: float) -> torch.Tensor:
    """Return log-probs of which one is the next number from the limit."""
    limit = torch.tensor([-1.0, most, -2.0, -0.5], dtype=dtype)
    return torch.where(limit > 0, torch.nextafter(limit, torch.tensor(to, dtype=dtype)), limit)


def watched(**fields: Any) -> AgentTrajectory:
    plain: dict[str, Any] = {
        "task_id": "t",
        "input_ids": torch.arange(6),
        "loss_mask": torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8),
        "response_start": 2,
        "response_mask": torch.tensor([True, True, False, True]),
        "old_log_probs": torch.tensor([-0.5, 0.0, -3.0, -1e-6]),
        "policy_version": 1,
    }
    return AgentTrajectory(**plain | fields)


def warnings_of(caplog: pytest.LogCaptureFixture, *rollouts: Any) -> list[str]:
    with caplog.at_level(logging.WARNING), TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        for rollout in rollouts:
            buffer.add_trajectories([rollout])
        assert len(buffer) == len(rollouts)
    return [record.message for record in caplog.records]


SOUND: list[dict[str, Any]] = [
    {"input_ids": np.arange(6), "loss_mask": None},
    {"old_log_probs": torch.tensor([-0.5, -1.0, NAN, -0.1])},  # NaN at an environment token only
    {"old_log_probs": torch.full((4,), -1.0).to(torch.float8_e5m2), "input_ids": torch.arange(6).to(torch.uint16)},
    *({"old_log_probs": beside(dtype, most, -9.0)} for dtype, most in MOST),
    {"loss_mask": torch.tensor([0, 0, 7, 1, 0, 1])},
    {"old_log_probs": torch.zeros(0), "response_start": 6, "response_mask": None},
    {"input_ids": torch.zeros(0, dtype=torch.int64), "loss_mask": None, "response_start": None, "response_mask": None},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": np.array([0, 1, 2, 3, 4, -100])}, "negative token ids"),
    ({"response_mask": torch.tensor([1, 1, 1, 1], dtype=torch.uint8)}, "response_mask that is not loss_mask"),
    ({"old_log_probs": torch.tensor([-INF, -1.0, -3.0, -1.0])}, "old_log_probs that are above 0 or not finite"),
    *(({"old_log_probs": beside(dtype, most, 9.0)}, "old_log_probs that are above") for dtype, most in MOST),
    ({"old_log_probs": torch.tensor([-0.5, NAN, -1.0, -0.1])}, "old_log_probs that are above 0 or not finite"),
    ({"rollout_log_probs": torch.tensor([2.0, 0.0]), "response_start": None, "response_mask": None,
      "old_log_probs": None}, "rollout_log_probs that are above"),
]  # fmt: skip


@pytest.mark.parametrize("fields", SOUND)
def test_what_can_be_true_is_not_told(fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, watched(**fields)) == []


@pytest.mark.parametrize(("fields", "says"), WRONG)
def test_what_is_certainly_wrong_is_told_and_kept(
    fields: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    [text] = warnings_of(caplog, watched(), watched(rollout_id="7", **fields))
    assert says in text
    assert "rollout '7' of task 't'" in text


def test_what_goes_on_being_wrong_is_told_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    wrong = [watched(input_ids=torch.full((6,), -1), rollout_id=str(number)) for number in range(120)]
    assert [text.split(" ")[0] for text in warnings_of(caplog, *wrong)] == ["1", "10", "100"]


def test_blocks_of_steps_and_rollouts_of_agents_in_one_store_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    block = Trajectory(rewards=torch.zeros(3, 2, 1))
    [text] = warnings_of(caplog, watched(), block, watched(), block)
    assert "has agent trajectories, and step trajectories are added" in text
