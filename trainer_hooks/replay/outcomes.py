"""Outcomes of a task's rollouts: successes, failures and unknown ones. Pure.

A rollout *succeeds* if its outcome reaches the threshold. It is *unknown*, neither a success nor a failure, if its
outcome is absent or not finite, or if it was asked for and did not come back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore._core.base.arguments import is_number
from trajstore._core.columns.facts import session_of
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

REPLAYED_ID = "replayed_trajectory_id"
"""Key of ``metadata`` in a replayed copy: its trajectory's id in the pool's store; absent for a pool in memory."""

REPLAY_MARK = "is_experience_replay"
"""Key of ``metadata``, true on a trajectory that was drawn from the pool."""


def is_success(outcome: float | None, threshold: float = 1.0) -> bool:
    """Return whether an outcome reaches the threshold; an unknown one does not.

    Both sides are compared as float32, since reward functions compute in float32, in which 0.7 is a little less than
    Python's 0.7. An outcome equal to the threshold in either precision reaches it.

    Raises:
        ConfigurationError: the threshold is not finite.
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
    """Counts of one task's fresh rollouts in one step."""

    asked: int
    """Rollouts that were requested."""
    observed: int
    """Of these, rollouts that returned with a finite outcome."""
    successes: int
    """Of these, successes."""

    @property
    def failed(self) -> bool:
        """True if a failure was observed."""
        return self.successes < self.observed

    def solved(self, n_rollout: int) -> bool:
        """Return whether the task counts as solved: full evidence, and every rollout succeeded.

        Evidence is full if every requested rollout has an outcome, and there are at least two of them and at least half
        of ``n_rollout``. A replay task makes fewer than ``n_rollout``, and a single success says little.
        """
        enough = min(n_rollout, max(2, (n_rollout + 1) // 2))
        return self.observed >= max(self.asked, enough) and not self.failed

    def difficulty(self, n_rollout: int) -> int | None:
        """Return the task's bucket: the estimated number of successes among ``n_rollout`` rollouts.

        If all ``n_rollout`` were observed, it is their number of successes. Otherwise, as for a replay task, the share
        is scaled up: 3 of 4 are 6 of 8. It is ``n_rollout`` only for a solved task, and 0 only without a success.

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

    An integer too large for a float becomes infinite.

    Raises:
        InvalidTrajectoryError: the outcome is not a number; ``"1"`` would pass for a success.
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
    """Return the trajectory's outcome; ``None`` if it is absent or not finite."""
    outcome = outcome_of(trajectory)
    return outcome if outcome is not None and math.isfinite(outcome) else None


def is_replayed(trajectory: AgentTrajectory) -> bool:
    """Return whether the trajectory was drawn from the pool, so that it says nothing about the current policy."""
    return bool(trajectory.metadata.get(REPLAY_MARK, False))


def member_of(row: AgentTrajectory, place: int) -> Hashable:
    """Return the member of a GRPO group that a row belongs to: its task's session, or else its place in a list."""
    session = session_of(row.metadata)
    return place if session is None else (row.task_id, session[0])


def asked_for(rollouts: Sequence[AgentTrajectory]) -> dict[str, int]:
    """Return the number of rollouts requested of each task, where it is recorded (``metadata["task_rollouts"]``).

    A crash may lose a part of a group; without its failures the rest would pass for a solved task.
    """
    counts = {rollout.task_id: rollout.metadata.get("task_rollouts") for rollout in rollouts}
    return {task: count for task, count in counts.items() if isinstance(count, int)}


def count_outcomes(
    trajectories: Iterable[AgentTrajectory], threshold: float = 1.0, asked: Mapping[str, int] | None = None
) -> dict[str, TaskOutcome]:
    """Return the outcomes of each task's rollouts, in order of first appearance. Replayed ones are left out.

    Rows of one session (:func:`member_of`) count once.

    Args:
        trajectories: the rollouts of one step.
        threshold: lowest outcome of a success.
        asked: number of requested rollouts, by task; for absent tasks, the number of given rollouts.

    Raises:
        InvalidTrajectoryError: a trajectory has no ``task_id``.
    """
    counts: dict[str, list[int]] = {}
    members: set[Hashable] = set()
    for place, trajectory in enumerate(trajectories):
        if not trajectory.task_id:
            raise InvalidTrajectoryError(
                f"field task_id: empty (rollout {trajectory.rollout_id!r}); the pool keeps trajectories by task, set it"
            )
        if is_replayed(trajectory) or (member := member_of(trajectory, place)) in members:
            continue
        members.add(member)
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
