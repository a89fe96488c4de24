"""Rollouts of which verl's reward does not tell whether they succeeded, and why."""

from __future__ import annotations

from trainer_hooks.verl.config import SECTION, OutcomeRule
from trajstore.trajectory import AgentTrajectory


def has_outcome(trajectory: AgentTrajectory) -> bool:
    """Return whether a rollout's reward told whether it succeeded."""
    return trajectory.reward is not None and trajectory.reward.outcome is not None


def why_no_outcome(trajectory: AgentTrajectory, rule: OutcomeRule) -> str:
    """Return why a rollout has no outcome, in a clause that names the option."""
    if trajectory.reward is None:
        return "it was dropped before it had a reward"
    extra = trajectory.reward.metadata.get("extra", {})
    if rule.key is None:
        return f"its score is {trajectory.reward.metadata.get('score')}"
    if rule.key in extra:
        return f"{SECTION}.outcome.key: {rule.key!r} is {extra[rule.key]!r}, no finite number"
    known = ", ".join(sorted(extra)) or "none"
    return f"{SECTION}.outcome.key: the reward function gave no {rule.key!r}; it gave: {known}"
