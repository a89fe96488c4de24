"""Builders of small agent trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trajstore.trajectory import AgentTrajectory, Reward

PROMPT, RESPONSE = 2, 4


def build(task: str = "a", tokens: int = 0, outcome: float | None = 1.0, **fields: Any) -> AgentTrajectory:
    """A trajectory of 2 prompt and 4 response tokens, the second response token not the model's.

    ``tokens`` makes the ids of the response: equal numbers, equal tokens.
    """
    ids = torch.arange(PROMPT + RESPONSE)
    ids[PROMPT:] += 1000 * tokens
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": str(tokens), "author": "llm"}],
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.tensor([0, 0, 1, 0, 1, 1]),
        "response_start": PROMPT,
        "old_log_probs": torch.tensor([-0.5, -9.0, -0.25, -1.0]),
        "response_mask": torch.tensor([1, 0, 1, 1]),
        "reward": Reward(outcome=outcome),
        "task_id": task,
        "rollout_id": f"{task}/{tokens}",
        "entropy": 1.0,
        "policy_version": 0,
        "metadata": {"note": ["kept"]},
    }
    return AgentTrajectory(**(values | fields))


@pytest.fixture(scope="session")
def make() -> Callable[..., AgentTrajectory]:
    return build
