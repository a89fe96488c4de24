"""Metrics of replay: flat names and plain floats, for any logger. Torch only.

Those of tokens are computed from sums over tokens, which can be added over the losses of a step, over micro-batches
and over ranks of any number of tokens; means cannot.

A quantity that does not exist (the ratio of a side without tokens, the age of an unknown version) has no entry: 0
always means a measured 0. The pool reports its own contents (``ExperienceManager.metrics``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer_hooks.replay import is_success
from trainer_hooks.replay.outcomes import known_outcome
from trainer_hooks.replay.rows import response_length
from trainer_hooks.replay.wellformed import field_problem
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
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
def record_sums(
    old_log_probs: Tensor, recorded_old_log_probs: Tensor, recorded_mask: Tensor, off_policy_mask: Tensor
) -> dict[str, float]:
    """Return differences between recorded and current log-probs of off-policy tokens, for :func:`added`.

    Sum and maximum of |current - recorded| in nats, and number of those tokens that have a record. Synchronizes once.

    Args:
        old_log_probs: [B, R], under the current policy, before replacement.
        recorded_old_log_probs: [B, R].
        recorded_mask: [B, R].
        off_policy_mask: [B, R], off-policy and counted (``exp_mask``'s response part and ``response_mask``).
    """
    both = off_policy_mask.bool() & recorded_mask.bool()
    difference = torch.where(both, old_log_probs.double() - recorded_old_log_probs.double(), 0.0).abs()
    largest = torch.cat([difference.flatten(), difference.new_zeros(1)]).amax()  # works for an empty tensor
    tokens, total, highest = torch.stack([both.sum().double(), difference.sum(), largest]).tolist()
    return {"recorded_tokens": tokens, "recorded_difference": total, "recorded_difference_max": highest}


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


# ---- of the loss ----

RATIO_NEAR_ZERO = 0.1
"""Importance ratio below which a token's gradient is negligible."""

SIDES = ("on", "off")

_TOKEN_MEANS = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower")
"""Outputs of the loss for each side, as means over its tokens."""

_SIDE_SUMS = ("tokens", "ratio", *_TOKEN_MEANS, "kl")

SUMS = (*(f"{side}_{name}" for side in SIDES for name in _SIDE_SUMS), "off_ratio_squared", "off_near_zero")
EXTREMES = ("on_ratio_max", "off_ratio_max", "on_ratio_min", "off_ratio_min")


@torch.no_grad()
def token_sums(loss: Mapping[str, Tensor], response_mask: Tensor, exp_mask: Tensor) -> dict[str, float]:
    """Return all sums and extremes of one loss computation. Synchronizes with the device once.

    ``on_`` for fresh tokens, ``off_`` for replayed ones. For a side without tokens the sums are 0, ``_ratio_max`` is
    -inf and ``_ratio_min`` inf.

    Args:
        loss: from ``het_compute_token_on_off_policy_loss``.
        response_mask: [B, R], as given to it.
        exp_mask: [B, R], as given to it.

    Raises:
        ConfigurationError: ``loss`` lacks a key.
    """
    needed = ("importance_ratio", *(f"{side}_{name}" for side in SIDES for name in _TOKEN_MEANS))
    if lacking := [key for key in needed if key not in loss]:
        raise ConfigurationError(
            f"loss: lacks {', '.join(lacking)}; give what het_compute_token_on_off_policy_loss returned"
        )
    valid, ratio = response_mask.bool(), _in_range(loss["importance_ratio"])
    replayed = exp_mask.bool()
    off = valid & replayed
    kl = -ratio.clamp(min=torch.finfo(torch.float32).tiny).log()
    values = {
        "off_ratio_squared": torch.where(off, ratio, 0.0).square().sum(),
        "off_near_zero": (off & (ratio < RATIO_NEAR_ZERO)).sum(),
    }
    for side, mask in zip(SIDES, (valid & ~replayed, off), strict=True):
        tokens = mask.sum()
        values[f"{side}_tokens"] = tokens
        values[f"{side}_kl"] = torch.where(mask, kl, 0.0).sum()
        values[f"{side}_ratio"] = torch.where(mask, ratio, 0.0).sum()
        values |= {f"{side}_{name}": loss[f"{side}_{name}"].double() * tokens for name in _TOKEN_MEANS}
        lowest, highest = ratio.new_full((1,), -torch.inf), ratio.new_full((1,), torch.inf)  # for an empty tensor
        values[f"{side}_ratio_max"] = torch.cat([torch.where(mask, ratio, -torch.inf).flatten(), lowest]).amax()
        values[f"{side}_ratio_min"] = torch.cat([torch.where(mask, ratio, torch.inf).flatten(), highest]).amin()
    names = (*SUMS, *EXTREMES)
    return dict(zip(names, torch.stack([values[name].double() for name in names]).tolist(), strict=True))


def added(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the results of several :func:`token_sums` and :func:`record_sums`; empty without any."""
    result: dict[str, float] = {}
    for mapping in sums:
        for name, value in mapping.items():
            before = result.get(name)
            if before is None or value != value:  # NaN propagates
                result[name] = value
            elif name.endswith(("_max", "_min")):
                result[name] = max(before, value) if name.endswith("_max") else min(before, value)
            else:
                result[name] = before + value
    return result


def figures_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the figures computed from sums; a side without tokens has none, and no tokens at all give nothing.

    ``recorded_difference_mean``, ``recorded_difference_max``: of :func:`record_sums`, if there is a record. The others:
    ``off_policy_share`` (of tokens); for each side, with ``on_`` or ``off_``: ``pg_loss``, ``pg_clipfrac``,
    ``pg_clipfrac_lower``, ``ppo_kl`` (mean of old - current log-prob in nats), ``ratio_mean``, ``ratio_max``,
    ``ratio_min``; ``off_ratio_near_zero_share``: share of replayed tokens with a ratio below 0.1; and
    ``off_effective_sample_size``, see :func:`effective_sample_size`.

    Args:
        sums: all of :func:`token_sums`, or each of these sums divided by the same number; those of
            :func:`record_sums`; may be empty.
    """
    result = {}
    if recorded := sums.get("recorded_tokens"):
        result["recorded_difference_mean"] = sums["recorded_difference"] / recorded
        result["recorded_difference_max"] = sums["recorded_difference_max"]
    if total := sum(sums.get(f"{side}_tokens", 0.0) for side in SIDES):
        result["off_policy_share"] = sums["off_tokens"] / total
    for side in SIDES:
        if not (tokens := sums.get(f"{side}_tokens")):
            continue
        result |= {f"{side}_{name}": sums[f"{side}_{name}"] / tokens for name in _TOKEN_MEANS}
        result[f"{side}_ppo_kl"] = sums[f"{side}_kl"] / tokens
        result[f"{side}_ratio_mean"] = sums[f"{side}_ratio"] / tokens
        result |= {f"{side}_ratio_{end}": sums[f"{side}_ratio_{end}"] for end in ("max", "min")}
    if sums.get("off_tokens"):
        result["off_ratio_near_zero_share"] = sums["off_near_zero"] / sums["off_tokens"]
        size = effective_sample_size(sums["off_tokens"], sums["off_ratio"], sums["off_ratio_squared"])
        if size is not None:
            result["off_effective_sample_size"] = size
    return {PREFIX + name: value for name, value in result.items()}


def effective_sample_size(tokens: float, ratio: float, ratio_squared: float) -> float | None:
    """Return (sum of r)² / (n · sum of r²): in (0, 1], 1 when all are equal; ``None`` if all ratios are 0.

    This is the share of the tokens that carries the whole weight (Kish 1965).

    Args:
        tokens: n, above 0.
        ratio: sum of the ratios r.
        ratio_squared: sum of their squares.
    """
    return ratio**2 / (ratio_squared * tokens) if ratio_squared else None


def _in_range(ratio: Tensor) -> Tensor:
    """Return ratios in float64, clamped to float32's largest, so that sums of overflowed ratios stay finite."""
    return ratio.double().clamp(max=torch.finfo(torch.float32).max)
