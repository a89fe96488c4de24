"""What verl's rewards say of rollouts: scores as verl shows them, and why a rollout has no outcome."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from trainer_hooks.metrics import PREFIX
from trainer_hooks.verl.config import SECTION, OutcomeRule
from trainer_hooks.verl.first_told import FirstTold
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


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


class WithoutOutcome:
    """Counts rollouts that have no outcome; the first are told of.

    Args:
        rule: what makes an outcome of a reward.
    """

    def __init__(self, rule: OutcomeRule) -> None:
        self._rule = rule
        self._found = FirstTold(logger)

    def look(self, made: Sequence[AgentTrajectory]) -> None:
        """Count those among some rollouts."""
        found = [one for one in made if not has_outcome(one)]
        if found:
            self._found.add(
                len(found),
                "%d of %d rollouts have no outcome (%s is the first): %s. They are recorded, and neither successes nor"
                " failures; recording/without_outcome counts them",
                len(found),
                len(made),
                found[0].rollout_id,
                why_no_outcome(found[0], self._rule),
            )

    def take(self) -> int:
        """Return how many there were since the last call."""
        return self._found.take()


def score_metrics(fresh: Sequence[AgentTrajectory], replayed: Sequence[AgentTrajectory]) -> dict[str, float]:
    """Return the mean score of fresh rollouts, of replayed ones and of both: the last is ``critic/score/mean``.

    In units of the reward function, where outcomes are relative to what counts as a success.
    """
    figures = {}
    for side, rollouts in (("fresh", fresh), ("replayed", replayed), ("mixed", [*fresh, *replayed])):
        scores = [score for one in rollouts if (score := score_of(one)) is not None]
        if scores:
            figures[f"{PREFIX}{side}_score_mean"] = sum(scores) / len(scores)
    return figures


def score_of(trajectory: AgentTrajectory) -> float | None:
    """Return what verl's reward gave a rollout; the outcome of one that verl did not rate; ``None`` if not finite."""
    reward = trajectory.reward
    score = None if reward is None else reward.metadata.get("score", reward.outcome)
    return score if isinstance(score, int | float) and math.isfinite(score) else None
