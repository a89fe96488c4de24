"""What verl's rewards say of rollouts: scores as verl shows them, and why a rollout has no outcome. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer_hooks.metrics import PREFIX
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


def score_metrics(fresh: Sequence[AgentTrajectory], replayed: Sequence[AgentTrajectory]) -> dict[str, float]:
    """Return the mean score of fresh rollouts, of replayed ones and of both: the last is ``critic/score/mean``.

    In units of the reward function, where outcomes are relative to what counts as a success.
    """
    figures = {}
    for side, rollouts in (("fresh", fresh), ("replayed", replayed), ("mixed", [*fresh, *replayed])):
        scores = [score for one in rollouts if (score := _score(one)) is not None]
        if scores:
            figures[f"{PREFIX}{side}_score_mean"] = sum(scores) / len(scores)
    return figures


def _score(trajectory: AgentTrajectory) -> float | None:
    score = None if trajectory.reward is None else trajectory.reward.metadata.get("score")
    return score if isinstance(score, int | float) and math.isfinite(score) else None
