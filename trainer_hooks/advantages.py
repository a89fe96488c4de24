"""Group-relative advantages of outcome rewards (GRPO, arXiv 2402.03300). Torch and numpy only; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trajstore._core.base.arguments import finite, truth
from trajstore.errors import ConfigurationError

Groups = Tensor | npt.NDArray[Any] | Sequence[object]
"""One group per row: ``group_ids`` as an integer tensor, or ``uid`` as strings."""


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Groups,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    rollouts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return every row's score relative to its group, spread over its response tokens.

    The score s of a row is the sum of its token rewards. With mean m and standard deviation d (divisor n - 1) of the
    group's scores, the advantage is ``(s - m) / (d + epsilon)``, or ``s - m`` without normalization. A group of one
    rollout has m = 0 and d = 1. The rows of a group may be anywhere in the batch.

    Mean and deviation are computed in float64: rounding in float32 gives a group of equal scores a tiny deviation
    instead of none, which the division by ``d + epsilon`` would amplify.

    Args:
        token_level_rewards: [B, R], floating point. All of a row's rewards count, also outside the mask.
        response_mask: [B, R], bool or number; the advantage is multiplied by it.
        index: [B], the group of each row: ``uid`` or ``group_ids``. Objects are compared by their string form.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by the standard deviation (GRPO) or not (Dr. GRPO, arXiv 2503.20783).
        rollouts: [B] int64, the rollout of each row (``Batch.rollouts``), if rollouts have several rows: each row has
            the rollout's reward, the group counts the rollout once, and its rows share the advantage. ``None``: each
            row is a rollout.

    Returns:
        Advantages and returns, [B, R] in the dtype of the rewards; with outcome rewards they are the same tensor.

    Raises:
        ConfigurationError: shapes don't fit, or a row's score is not finite.
    """
    finite("epsilon", epsilon, 0)
    if token_level_rewards.dim() != 2 or response_mask.shape != token_level_rewards.shape:
        raise ConfigurationError(
            f"token_level_rewards, response_mask: shapes {list(token_level_rewards.shape)} and "
            f"{list(response_mask.shape)}, must both be [B, R]"
        )
    scores = token_level_rewards.sum(dim=-1, dtype=torch.float64)
    bad = (~scores.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise ConfigurationError(
            f"token_level_rewards: rows {bad[:8]} sum to nan or infinity ({len(bad)} of {len(scores)} rows); "
            "correct the reward function or leave these rows out"
        )
    group = _group_numbers(index, scores)
    weight = torch.ones_like(scores)  # per row; the rows of a rollout sum to 1
    if rollouts is not None:
        rollout = _group_numbers(rollouts, scores)
        weight /= _sum_by_group(weight, rollout)
        scores = _sum_by_group(scores * weight, rollout)
    count = _sum_by_group(weight, group).round()
    alone = count == 1
    mean = (_sum_by_group(scores * weight, group) / count).masked_fill(alone, 0.0)
    advantage = scores - mean
    if truth("norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo):
        variance = _sum_by_group(advantage.square() * weight, group) / (count - 1.0).clamp(min=1.0)
        advantage /= variance.sqrt().masked_fill(alone, 1.0) + epsilon
    advantages = advantage.to(token_level_rewards.dtype)[:, None] * response_mask.to(token_level_rewards.dtype)
    return advantages, advantages


def share_by_rollout(advantages: Tensor, rollouts: Tensor) -> Tensor:
    """Return advantages [B, R] divided by the number of rows of their rollout, so that rollouts weigh the same.

    Args:
        advantages: [B, R].
        rollouts: [B] int64, the rollout of each row (``Batch.rollouts``).
    """
    ones = torch.ones(len(advantages), dtype=advantages.dtype, device=advantages.device)
    rows = _sum_by_group(ones, _group_numbers(rollouts, ones))
    return advantages / rows[:, None]


def _group_numbers(index: Groups, scores: Tensor) -> Tensor:
    """Return the groups as numbers from 0, [B] int64, on the device of ``scores``."""
    if isinstance(index, Tensor):
        numbers: Tensor = torch.unique(index, return_inverse=True)[1]
    else:
        values = np.asarray(index)
        # np.unique needs an order, which objects lack.
        keys = values.astype(str) if values.dtype == object else values
        numbers = torch.from_numpy(np.unique(keys, return_inverse=True)[1])
    if numbers.shape != scores.shape:
        raise ConfigurationError(f"index: shape {list(numbers.shape)}, must be [B] with B = {len(scores)}")
    return numbers.to(scores.device)


def _sum_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Return, for every row, the sum of ``values`` [B] over the rows of its group."""
    return torch.zeros_like(values).index_add_(0, group, values)[group]
