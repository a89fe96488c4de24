"""Metrics of replay: flat names and plain floats, for any logger. Torch only.

A quantity that does not exist (the ratio of a side without tokens, the age of an unknown version) has no entry: 0
always means a measured 0. The pool reports its own contents (``ExperienceManager.metrics``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

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

Shown = Literal["main", "all"]
"""The figures that a step reports."""

MAIN = frozenset(
    {
        *("pool_tasks", "pool_trajectories", "skipped_tasks", "refused_share", "unreadable"),
        *("nothing_to_replay", "waiting_tasks", "unknown_tasks", "other_prompts", "too_long"),
        *("starving_buckets", "similar_tasks"),
        *("replayed_rows", "demonstration_rows", "age_mean", "age_unknown_rows"),
        *("fresh_score_mean", "fresh_success_rate", "recorded_difference_mean", "off_policy_share", "off_ratio_mean"),
        *("off_ratio_near_zero_share", "off_effective_sample_size", "off_pg_loss"),
    }
)
"""Actionable figures, besides ``refused/<reason>`` and ``histories_refused/<reason>``.

They are the first table of ``docs/howto/replay_figures.md``.
"""

Label = TypeVar("Label", bound=Hashable)


def shown(figures: Mapping[str, float], which: Shown) -> dict[str, float]:
    """Return the figures of replay to report, and all other figures."""
    return {name: value for name, value in figures.items() if which == "all" or _is_main(name)}


def _is_main(name: str) -> bool:
    figure = name.removeprefix(PREFIX)
    return figure == name or figure in MAIN or figure.startswith(("refused/", "histories_refused/"))


def rollout_metrics(
    fresh: Sequence[AgentTrajectory], replayed: Sequence[AgentTrajectory], success_threshold: float
) -> dict[str, float]:
    """Return figures of fresh rollouts, of replayed ones, and of both together.

    ``fresh_``, ``replayed_``, ``mixed_``, each with ``score_mean`` (:func:`score_of`), ``success_rate``,
    ``response_length_mean`` (tokens, of all rows of a rollout) and ``entropy_mean`` (nats, of the rollouts' means).
    Trainers show the mixed ones, which are better than the policy, because successes are replayed. Figures without data
    are left out; a malformed rollout, which the pool refuses, counts only with its outcome.
    """
    figures: dict[str, float] = {}
    for side, rollouts in (("fresh", fresh), ("replayed", replayed), ("mixed", [*fresh, *replayed])):
        outcomes = [outcome for rollout in rollouts if (outcome := known_outcome(rollout)) is not None]
        wellformed = [rollout for rollout in rollouts if not field_problem(rollout)]
        columns = {
            "score_mean": [score for rollout in rollouts if (score := score_of(rollout)) is not None],
            "success_rate": [float(is_success(outcome, success_threshold)) for outcome in outcomes],
            "response_length_mean": [
                float(length) for rollout in wellformed if (length := _length_of(rollout)) is not None
            ],
            "entropy_mean": [rollout.entropy for rollout in wellformed if rollout.entropy is not None],
        }
        figures |= {f"{PREFIX}{side}_{name}": sum(column) / len(column) for name, column in columns.items() if column}
    return figures


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

    ``recorded_share``: share of off-policy tokens with a record; ``recorded_difference_mean``,
    ``recorded_difference_max``: of |current - recorded| in nats, over those.

    Args:
        old_log_probs: [B, R], under the current policy, before replacement.
        recorded_old_log_probs: [B, R].
        recorded_mask: [B, R].
        off_policy_mask: [B, R], off-policy and counted (``exp_mask``'s response part and ``response_mask``).
    """
    off = off_policy_mask.bool()
    both = off & recorded_mask.bool()
    difference = torch.where(both, old_log_probs.double() - recorded_old_log_probs.double(), 0.0).abs()
    mean = difference.sum() / both.sum().clamp(min=1)
    largest = torch.cat([difference.flatten(), difference.new_zeros(1)]).amax()  # works for an empty tensor
    tokens, recorded, mean_value, max_value = torch.stack(
        [off.sum().double(), both.sum().double(), mean, largest]
    ).tolist()
    result: dict[str, float] = {}
    if tokens:
        result[f"{PREFIX}recorded_share"] = recorded / tokens
    if recorded:
        result[f"{PREFIX}recorded_difference_mean"] = mean_value
        result[f"{PREFIX}recorded_difference_max"] = max_value
    return result


def batch_metrics(
    task_ids: Sequence[str],
    is_experience_replay: Sequence[bool],
    policy_versions: Sequence[int | None],
    global_steps: int,
    demonstrations: int = 0,
) -> dict[str, float]:
    """Return the composition of a batch.

    ``experience_tasks`` (tasks with at least one replayed row), ``tasks``, ``replayed_rows``, ``rows``. For the
    replayed rows of known policy age: ``age_mean``, ``age_max``, ``age_min``, in training steps (``global_steps`` minus
    the version). ``age_unknown_rows``: the other replayed rows, without a version or with a newer one, less the
    demonstrations, which have no age.

    Args:
        task_ids: for every row.
        is_experience_replay: for every row.
        policy_versions: for every row; None = unknown.
        global_steps: number of the step.
        demonstrations: number of replayed rows of demonstrations.
    """
    replayed = [row for row, flag in enumerate(is_experience_replay) if flag]
    result = {
        "experience_tasks": len({task_ids[row] for row in replayed}),
        "tasks": len(set(task_ids)),
        "replayed_rows": len(replayed),
        "rows": len(task_ids),
    }
    figures = {name: float(value) for name, value in result.items()}
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
