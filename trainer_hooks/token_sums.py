"""Sums over the tokens of loss computations, and the figures computed from them. Torch only.

Sums can be added over the losses of a step, over micro-batches and over ranks of any number of tokens; means cannot. So
figures are computed once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer_hooks.metrics import PREFIX
from trajstore.errors import ConfigurationError

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
    """Combine the results of several :func:`token_sums`; empty without any."""
    result: dict[str, float] = {}
    for mapping in sums:
        for name, value in mapping.items():
            before = result.get(name)
            if before is None or value != value:  # NaN propagates
                result[name] = value
            elif name in EXTREMES:
                result[name] = max(before, value) if name.endswith("_max") else min(before, value)
            else:
                result[name] = before + value
    return result


def figures_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the figures computed from sums; a side without tokens has none, and no tokens at all give nothing.

    ``off_policy_share`` (of tokens); for each side, with ``on_`` or ``off_``: ``pg_loss``, ``pg_clipfrac``,
    ``pg_clipfrac_lower``, ``ppo_kl`` (mean of old - current log-prob in nats), ``ratio_mean``, ``ratio_max``,
    ``ratio_min``; ``off_ratio_near_zero_share``: share of replayed tokens with a ratio below 0.1; and
    ``off_effective_sample_size``, see :func:`effective_sample_size`.

    Args:
        sums: all of :func:`token_sums`, or each of these sums divided by the same number; may be empty.
    """
    total = sum(sums.get(f"{side}_tokens", 0.0) for side in SIDES)
    if not total:
        return {}
    result = {"off_policy_share": sums["off_tokens"] / total}
    for side in SIDES:
        if not (tokens := sums[f"{side}_tokens"]):
            continue
        result |= {f"{side}_{name}": sums[f"{side}_{name}"] / tokens for name in _TOKEN_MEANS}
        result[f"{side}_ppo_kl"] = sums[f"{side}_kl"] / tokens
        result[f"{side}_ratio_mean"] = sums[f"{side}_ratio"] / tokens
        result |= {f"{side}_ratio_{end}": sums[f"{side}_ratio_{end}"] for end in ("max", "min")}
    if sums["off_tokens"]:
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
