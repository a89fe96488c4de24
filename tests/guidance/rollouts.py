"""Rollouts for tests of guidance."""

from __future__ import annotations

from trajstore.trajectory import AgentTrajectory, Reward


def rollout(task: str, reply: str, outcome: float | None = 1.0, name: str = "1", query: str = "") -> AgentTrajectory:
    """Return a rollout of one question and one reply."""
    return AgentTrajectory(
        messages=[
            {"role": "system", "content": "You act in a house."},
            {"role": "user", "content": query or f"please do {task}"},
            {"role": "assistant", "content": reply},
        ],
        reward=None if outcome is None else Reward(outcome=outcome),
        task_id=task,
        rollout_id=name,
        policy_version=3,
    )
