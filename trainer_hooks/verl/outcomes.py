"""Rollouts of which verl's reward does not tell whether they succeeded: counted, and why it is so."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
