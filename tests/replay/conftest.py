"""Builders of small agent trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer_hooks.replay import ExperienceManager
from trajstore.trajectory import AgentTrajectory, Reward

PROMPT, RESPONSE = 2, 4


def build(task: str = "a", tokens: int = 0, outcome: float | None = 1.0, **fields: Any) -> AgentTrajectory:
    """Return a trajectory of 2 prompt and 4 response tokens; the second response token is not the model's.

    ``tokens`` determines the response's ids.
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


def row(prompt: int, response: int, seed: int = 0, **more: Any) -> AgentTrajectory:
    """Return a trajectory of random tokens with these prompt and response lengths."""
    random = torch.Generator().manual_seed(seed)
    mask = (torch.rand(response, generator=random) > 0.3).long()
    mask[0] = 1
    return AgentTrajectory(
        input_ids=torch.randint(2, 1000, (prompt + response,), generator=random),
        loss_mask=torch.cat([torch.zeros(prompt, dtype=torch.int64), mask]),
        response_start=prompt,
        response_mask=mask,
        old_log_probs=-torch.rand(response, generator=random),
        entropys=torch.rand(response, generator=random),
        entropy=0.5,
        reward=Reward(outcome=1.0),
        task_id="a",
        rollout_id="r",
        policy_version=1,
        metadata={"score": seed, "common": 1},
        **more,
    )


def rollouts(task: str, outcomes: Sequence[float], first: int = 0, **fields: Any) -> list[AgentTrajectory]:
    """Return a step's rollouts of one task, with tokens from ``first`` on."""
    return [build(task, first + number, outcome, **fields) for number, outcome in enumerate(outcomes)]


def step(manager: ExperienceManager, batch: list[AgentTrajectory], entropies: Sequence[float] | None = None) -> None:
    """Admit a step's rollouts with these entropies; ``None`` = 1."""
    values = [1.0] * len(batch) if entropies is None else entropies
    manager.admit([replace(rollout, entropy=value) for rollout, value in zip(batch, values, strict=True)])


def view(manager: ExperienceManager) -> dict[str, Any]:
    """Return a pool's contents by rollout names."""
    entries = {task: [history.rollout_id for history in held] for task, held in manager.task2trajectories.items()}
    return {"buckets": manager.difficulty2task_dict, "skip": manager.skip_uid_set, "entries": entries}
