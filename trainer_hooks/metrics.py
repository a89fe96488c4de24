"""Metrics of replay: flat names and plain floats, for any logger. Torch only.

A quantity that does not exist (the ratio of a side without tokens, the age of an unknown version) has no entry: 0
always means a measured 0. The pool reports its own contents (``ExperienceManager.metrics``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer_hooks.replay import is_success
from trainer_hooks.replay.outcomes import known_outcome
from trainer_hooks.replay.rows import response_length
from trainer_hooks.replay.wellformed import field_problem
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

PREFIX = "experience_replay/"
"""Prefix of every name."""


def fresh_metrics(fresh: Sequence[AgentTrajectory], success_threshold: float) -> dict[str, float]:
    """Return figures of fresh rollouts; trainers show those of the whole batch, in which successes are replayed.

    ``fresh_score_mean`` (:func:`score_of`), ``fresh_success_rate``, ``fresh_response_length_mean`` (tokens, of all rows
    of a rollout) and ``fresh_entropy_mean`` (nats, of the rollouts' means). Figures without data are left out; a
    malformed rollout, which the pool refuses, counts only with its outcome.
    """
    outcomes = [outcome for rollout in fresh if (outcome := known_outcome(rollout)) is not None]
    wellformed = [rollout for rollout in fresh if not field_problem(rollout)]
    columns = {
        "score_mean": [score for rollout in fresh if (score := score_of(rollout)) is not None],
        "success_rate": [float(is_success(outcome, success_threshold)) for outcome in outcomes],
        "response_length_mean": [
            float(length) for rollout in wellformed if (length := _length_of(rollout)) is not None
        ],
        "entropy_mean": [rollout.entropy for rollout in wellformed if rollout.entropy is not None],
    }
    return {f"{PREFIX}fresh_{name}": sum(column) / len(column) for name, column in columns.items() if column}


def score_of(rollout: AgentTrajectory) -> float | None:
    """Return a rollout's reward in its own units: the reward's ``metadata["score"]``, as in verl.

    Falls back to the outcome; ``None`` if not finite.
    """
    reward_metadata = {} if rollout.reward is None else rollout.reward.metadata
    score = reward_metadata.get("score", known_outcome(rollout))
    return score if isinstance(score, int | float) and math.isfinite(score) else None


def _length_of(rollout: AgentTrajectory) -> int | None:
    """Return a rollout's response tokens; ``None`` also if ``metadata["rows"]`` is invalid."""
    try:
        return response_length(rollout)
    except InvalidTrajectoryError:  # the pool refuses it as malformed, with the reason
        return None


@torch.no_grad()
def record_metrics(
    old_log_probs: Tensor, recorded_old_log_probs: Tensor, recorded_mask: Tensor, off_policy_mask: Tensor
) -> dict[str, float]:
    """Return differences between recorded and current log-probs of off-policy tokens. Synchronizes once.

    ``recorded_difference_mean``, ``recorded_difference_max``: of |current - recorded| in nats, over those that have a
    record; empty without any.

    Args:
        old_log_probs: [B, R], under the current policy, before replacement.
        recorded_old_log_probs: [B, R].
        recorded_mask: [B, R].
        off_policy_mask: [B, R], off-policy and counted (``exp_mask``'s response part and ``response_mask``).
    """
    both = off_policy_mask.bool() & recorded_mask.bool()
    difference = torch.where(both, old_log_probs.double() - recorded_old_log_probs.double(), 0.0).abs()
    mean = difference.sum() / both.sum().clamp(min=1)
    largest = torch.cat([difference.flatten(), difference.new_zeros(1)]).amax()  # works for an empty tensor
    recorded, mean_value, max_value = torch.stack([both.sum().double(), mean, largest]).tolist()
    values = {"mean": mean_value, "max": max_value} if recorded else {}
    return {f"{PREFIX}recorded_difference_{name}": value for name, value in values.items()}


def batch_metrics(
    is_experience_replay: Sequence[bool],
    policy_versions: Sequence[int | None],
    global_steps: int,
    demonstrations: int = 0,
) -> dict[str, float]:
    """Return the composition of a batch.

    ``replayed_rows``, ``rows``. For the replayed rows of known policy age: ``age_mean``, ``age_max``, ``age_min``, in
    training steps (``global_steps`` minus the version). ``age_unknown_rows``: the other replayed rows, without a
    version or with a newer one, less the demonstrations, which have no age.

    Args:
        is_experience_replay: for every row.
        policy_versions: for every row; None = unknown.
        global_steps: number of the step.
        demonstrations: number of replayed rows of demonstrations.
    """
    replayed = [row for row, flag in enumerate(is_experience_replay) if flag]
    figures = {"replayed_rows": float(len(replayed)), "rows": float(len(is_experience_replay))}
    versions = (policy_versions[row] for row in replayed)
    ages = [global_steps - version for version in versions if version is not None and version <= global_steps]
    figures["age_unknown_rows"] = float(max(0, len(replayed) - len(ages) - demonstrations))
    if ages:
        figures |= {"age_mean": sum(ages) / len(ages), "age_max": float(max(ages)), "age_min": float(min(ages))}
    return {PREFIX + name: value for name, value in figures.items()}


class StepTimes:
    """Sums up the seconds spent in each named part of a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the ``with`` block, also after an exception, to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return ``{"experience_replay/seconds/<name>": seconds}`` since the last call, and reset."""
        seconds, self._seconds = self._seconds, {}
        return {f"{PREFIX}seconds/{name}": value for name, value in seconds.items()}
