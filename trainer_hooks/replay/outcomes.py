"""What the rollouts of a task came to: which of them succeeded, and how much of it is known. Pure.

A rollout *succeeds* if its outcome reaches the threshold. A rollout whose outcome is absent or not finite, and a
rollout that was asked for and did not come back, is *unknown*: it is neither a success nor a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.core.base.arguments import is_number
from trajstore.core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

REPLAY_MARK = "is_experience_replay"
"""Key of ``metadata`` that is true on a trajectory that came out of the pool."""


def is_success(outcome: float | None, threshold: float = 1.0) -> bool:
    """Return whether an outcome reaches the threshold; an unknown one does not.

    Reward functions compute in float32, in which 0.7 is a little less than Python's 0.7. Both sides are therefore
    compared as float32: an outcome that was given as the threshold, in either precision, reaches it.

    Raises:
        ConfigurationError: the threshold is no finite number.
    """
    if not math.isfinite(threshold):
        raise ConfigurationError(f"threshold: {threshold}, must be a finite number")
    if outcome is None or not math.isfinite(outcome):
        return False
    with np.errstate(over="ignore"):
        value, least = np.float32(outcome), np.float32(threshold)
    return bool(value >= least) if np.isfinite(least) else outcome >= threshold


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What the fresh rollouts of one task came to in one step."""

    asked: int
    """Rollouts that were to be made."""
    observed: int
    """Of these, rollouts that came back with a finite outcome."""
    successes: int
    """Of these, successes."""

    @property
    def failed(self) -> bool:
        """Whether a failure was seen."""
        return self.successes < self.observed

    def solved(self, n_rollout: int) -> bool:
        """Return whether the task can be taken for solved: full evidence, and every rollout succeeded.

        Evidence is full if every rollout that was asked for has an outcome, and these are two at the least and
        half of ``n_rollout``: a replay task makes fewer than ``n_rollout``, and one success alone says little.
        """
        enough = min(n_rollout, max(2, (n_rollout + 1) // 2))
        return self.observed >= max(self.asked, enough) and not self.failed

    def difficulty(self, n_rollout: int) -> int | None:
        """Return the task's bucket: successes among ``n_rollout`` rollouts, estimated from those that were observed.

        With all ``n_rollout`` observed it is the number of successes. Of fewer, as a replay task makes them, the
        share counts: 3 of 4 are 6 of 8. It is ``n_rollout`` only for a solved task, and 0 only without a success.

        Returns:
            A number in [0, n_rollout]; ``None`` if nothing was observed.
        """
        if not self.observed:
            return None
        if self.solved(n_rollout):
            return n_rollout
        estimate = math.floor(self.successes * n_rollout / self.observed + 0.5)
        return max(int(self.successes > 0), min(estimate, n_rollout - 1))


def outcome_of(trajectory: AgentTrajectory) -> float | None:
    """Return the trajectory's outcome; ``None`` if it has no reward or an unknown one.

    A whole number that no float reaches is infinite.

    Raises:
        InvalidTrajectoryError: the outcome is no number; ``"1"`` would pass for a success.
    """
    outcome = None if trajectory.reward is None else trajectory.reward.outcome
    if outcome is None:
        return None
    if not is_number(outcome):
        raise InvalidTrajectoryError(
            f"rollout {shown(trajectory.rollout_id)} of task {shown(trajectory.task_id)}: field reward.outcome:"
            f" {shown(outcome)} is a {type(outcome).__name__}, must be a number or None"
        )
    try:
        return float(outcome)
    except OverflowError:
        return math.inf if outcome > 0 else -math.inf


def known_outcome(trajectory: AgentTrajectory) -> float | None:
    """Return the trajectory's outcome; ``None`` if it says nothing: absent, or not finite."""
    outcome = outcome_of(trajectory)
    return outcome if outcome is not None and math.isfinite(outcome) else None


def is_replayed(trajectory: AgentTrajectory) -> bool:
    """Return whether the trajectory came out of the pool, and so says nothing about the current policy."""
    return bool(trajectory.metadata.get(REPLAY_MARK, False))


def asked_for(rollouts: Sequence[AgentTrajectory]) -> dict[str, int]:
    """Return how many rollouts each task was to make, where a recorder said so (``metadata["task_rollouts"]``).

    A crash may have taken a part of a group. Without its failures the rest could pass for a task that is solved.
    """
    said = {one.task_id: one.metadata.get("task_rollouts") for one in rollouts}
    return {task: count for task, count in said.items() if isinstance(count, int)}


def count_outcomes(
    trajectories: Iterable[AgentTrajectory], threshold: float = 1.0, asked: Mapping[str, int] | None = None
) -> dict[str, TaskOutcome]:
    """Return what the rollouts of each task came to, in order of first appearance. Replayed ones are left out.

    Args:
        trajectories: the rollouts of one step.
        threshold: outcome from which on a rollout is a success.
        asked: rollouts that were to be made, by task; a task that it lacks was to make those that are given.

    Raises:
        InvalidTrajectoryError: a trajectory has no ``task_id``.
    """
    counts: dict[str, list[int]] = {}
    for trajectory in trajectories:
        if not trajectory.task_id:
            raise InvalidTrajectoryError(
                f"field task_id: empty (rollout {trajectory.rollout_id!r}); the pool keeps trajectories by task, set it"
            )
        if is_replayed(trajectory):
            continue
        outcome = known_outcome(trajectory)
        count = counts.setdefault(trajectory.task_id, [0, 0, 0])
        count[0] += 1
        count[1] += outcome is not None
        count[2] += is_success(outcome, threshold)
    wanted = asked or {}
    return {
        task: TaskOutcome(max(given, wanted.get(task, 0)), observed, successes)
        for task, (given, observed, successes) in counts.items()
    }
