"""The GRPO loss of a batch that mixes fresh (on-policy) and replayed (off-policy) tokens. Torch only; pure.

``r = exp(log_prob - old_log_prob)`` is the importance ratio, ``A`` the advantage, ``(l, h)`` the clip range of the
token's side and ``c`` the dual-clip bound. For each token::

    u = max(-A r, -A clip(r, 1 - l, 1 + h));   loss = min(u, -A c) where A < 0, else u

For either sign of A this is ``-A s``, where s is r clamped to an interval ``[lo, hi]``:

    ========  =======  =======
    sign      lo       hi
    ========  =======  =======
    A >= 0    0        1 + h
    A < 0     1 - l    c
    ========  =======  =======

and its derivative by ``log_prob`` is ``-A r`` inside the interval, 0 outside. So one forward pass gives value and
derivative, and only the derivative is kept for the backward pass. (The clipped objective is that of PPO, arXiv
1707.06347, the bound c that of dual-clip PPO, arXiv 1912.09729.)
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer_hooks.masks import compute_response_mask
from trajstore._core.base.arguments import one_of, truth
from trajstore.errors import ConfigurationError

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How token losses are reduced to one number; see :func:`aggregate_loss`."""


class LossOptions(TypedDict):
    """The configuration's loss options, as keyword arguments of the loss."""

    off_cliprange_high: float
    off_policy_shaping: float | None
    drop_negative_off_policy: bool
    clip_off_policy: bool


def het_compute_token_on_off_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    exp_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    off_cliprange_high: float = 1.0,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: LossAggMode = "token-mean",
    *,
    off_policy_shaping: float | None = None,
    drop_negative_off_policy: bool = False,
    clip_off_policy: bool = True,
    rollouts: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the policy-gradient loss of a mixed batch, and figures about it.

    On-policy tokens are clipped with (``cliprange_low``, ``cliprange_high``), off-policy tokens with
    (``cliprange_low``, ``off_cliprange_high``). Computed in float32 (float64 for float64 log-probs), without
    synchronizing with the host. Positions outside ``response_mask`` affect no result or gradient, whatever their values
    (inf and NaN too). A side without tokens gives 0 with gradient 0.

    Only ``log_prob`` receives a gradient: the old policy and the advantages are constants of this loss. It can be
    differentiated once.

    Args:
        old_log_prob: [B, R], natural logarithm, under the policy that sampled (off-policy: as recorded).
        log_prob: [B, R], under the policy in training.
        advantages: [B, R].
        response_mask: [B, R], bool or number; nonzero = the token counts.
        exp_mask: [B, R], bool or number; nonzero = off-policy. For a mask over prompt and response, [B, P + R] as in a
            batch of ``build_batch``, the response's part counts.
        cliprange: l and h where ``cliprange_low`` or ``cliprange_high`` is None.
        cliprange_low: l of both sides.
        cliprange_high: h of on-policy tokens.
        off_cliprange_high: h of off-policy tokens.
        clip_ratio_c: c, at least 1.
        loss_agg_mode: how ``pg_losses`` is reduced to ``pg_loss``.
        off_policy_shaping: gamma > 0: on off-policy tokens ``r / (r + gamma)`` replaces r in the formula above, as in
            ExGRPO (arXiv 2510.02245); 0.1 and 0.5 are in use. None: r itself.
        drop_negative_off_policy: off-policy tokens with A < 0 give 0. They stay in every denominator, so that the
            weight of the other tokens doesn't depend on how many were dropped.
        clip_off_policy: False: ``-A r`` on off-policy tokens, without clip range and c.
        rollouts: [B] int64, the rollout of each row (``Batch.rollouts``): its rows are one sequence in ``pg_loss``.
            ``None``: each row is one.

    Returns:
        Scalars, except those marked [B, R]. With gradient: ``pg_loss``; ``pg_losses`` [B, R], 0 outside
        ``response_mask``, and its two parts ``on_pg_losses``, ``off_pg_losses`` [B, R], each 0 on the other side's
        tokens; their token means ``on_pg_loss``, ``off_pg_loss``. Without gradient: ``on_pg_clipfrac``,
        ``off_pg_clipfrac`` (share of the side's tokens at which the clip range changed the loss),
        ``on_pg_clipfrac_lower``, ``off_pg_clipfrac_lower`` (at which c did), ``ppo_kl`` (mean of old_log_prob -
        log_prob), ``importance_ratio`` [B, R], r before shaping, 1 outside ``response_mask``.

    Raises:
        ConfigurationError: shapes differ, or a parameter is out of range.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ConfigurationError("no clip range: give cliprange, or both cliprange_low and cliprange_high")
    _check_parameters(low, high, off_cliprange_high, clip_ratio_c, off_policy_shaping)
    clips = truth("clip_off_policy", clip_off_policy)
    if exp_mask.dim() == 2 and log_prob.dim() == 2 and exp_mask.shape[1] > log_prob.shape[1]:
        exp_mask = compute_response_mask(exp_mask, log_prob.shape[1])
    _check_shapes(
        log_prob, old_log_prob=old_log_prob, advantages=advantages, response_mask=response_mask, exp_mask=exp_mask
    )
    dtype = torch.float64 if log_prob.dtype == torch.float64 else torch.float32
    log_prob = log_prob.to(dtype)
    valid = response_mask.detach().bool()
    off_policy = valid & exp_mask.detach().bool()
    on, off = _as_numbers(valid ^ off_policy, dtype), _as_numbers(off_policy, dtype)

    with torch.no_grad():
        on_count, off_count = on.sum().clamp_(min=1), off.sum().clamp_(min=1)
        log_ratio = _zero_unless(log_prob - old_log_prob.to(dtype), valid)
        ppo_kl = -log_ratio.sum() / _count(valid, dtype)
        advantage = _zero_unless(advantages.to(dtype), valid)
        if truth("drop_negative_off_policy", drop_negative_off_policy):
            advantage.mul_(1.0 - off * _below_zero(advantage))
        on_bounds = _bounds(low, high, clip_ratio_c, dtype)
        off_bounds = _bounds(low, off_cliprange_high, clip_ratio_c, dtype) if clips else _no_bounds(dtype)
        terms = _token_terms(log_ratio, advantage, on, off, on_bounds, off_bounds, off_policy_shaping)
        del log_ratio, advantage

    pg_losses: Tensor = _WithDerivative.apply(log_prob, terms.losses, terms.derivative)  # type: ignore[no-untyped-call]
    on_pg_losses, off_pg_losses = pg_losses * on, pg_losses * off
    return {
        "pg_loss": aggregate_loss(pg_losses, valid, loss_agg_mode, rollouts),
        "pg_losses": pg_losses,
        "on_pg_losses": on_pg_losses,
        "off_pg_losses": off_pg_losses,
        "on_pg_loss": on_pg_losses.sum() / on_count,
        "off_pg_loss": off_pg_losses.sum() / off_count,
        "on_pg_clipfrac": terms.on_clipped / on_count,
        "on_pg_clipfrac_lower": terms.on_clipped_lower / on_count,
        "off_pg_clipfrac": terms.off_clipped / off_count,
        "off_pg_clipfrac_lower": terms.off_clipped_lower / off_count,
        "ppo_kl": ppo_kl,
        "importance_ratio": terms.ratio,
    }


def aggregate_loss(
    losses: Tensor, response_mask: Tensor, loss_agg_mode: LossAggMode, rollouts: Tensor | None = None
) -> Tensor:
    """Reduce token losses that are 0 outside ``response_mask`` to one number.

    ``token-mean``: mean over all tokens. ``token-sum``: their sum. ``seq-mean-token-sum``: sum over each row's tokens,
    then mean over the rows that have any. ``seq-mean-token-mean``: mean over each row's tokens, then over those rows.
    ``seq-mean-token-sum-norm``: ``seq-mean-token-sum`` divided by R, as in verl 0.9. AgentEvolver's is larger by the
    number of rows that have tokens: it divides the sum over all tokens by R. An empty mean is 0.

    With ``rollouts``, the rows of a rollout (of an agent session, for example) are one sequence. With S rollouts that
    have tokens, T_s tokens in all rows of rollout s, and L_s the sum of their losses::

        token-mean           sum of L_s / sum of T_s     as without
        token-sum            sum of L_s                  as without
        seq-mean-token-sum   (sum of L_s) / S            R is still that of a row in ``seq-mean-token-sum-norm``
        seq-mean-token-mean  (sum of L_s / T_s) / S      GRPO's 1/|o_i| with the whole rollout as o_i (arXiv 2402.03300)

    Args:
        losses: [B, R].
        response_mask: [B, R], bool.
        loss_agg_mode: one of the five names, with verl's meaning.
        rollouts: [B] int64, the rollout of each row; ``None``: each row is one.

    Raises:
        ConfigurationError: the mode is unknown.
    """
    one_of("loss_agg_mode", loss_agg_mode, get_args(LossAggMode))
    if loss_agg_mode == "token-mean":
        return losses.sum() / _count(response_mask, losses.dtype)
    if loss_agg_mode == "token-sum":
        return losses.sum()
    tokens = _as_numbers(response_mask, losses.dtype).sum(dim=-1)
    counted = tokens.clamp(max=1)
    if rollouts is not None:
        same = (rollouts[:, None] == rollouts).to(tokens)
        counted, tokens = counted / (same @ counted).clamp(min=1), same @ tokens
    rows = counted.sum().clamp_(min=1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (losses.sum(dim=-1) / tokens.clamp(min=1)).sum() / rows
    mean = losses.sum() / rows
    return mean / max(losses.shape[-1], 1) if loss_agg_mode == "seq-mean-token-sum-norm" else mean


class _Bounds(NamedTuple):
    """The interval that a side's ratio is clamped to: ``[0, upper]`` where A >= 0, else ``[lower, upper_negative]``."""

    lower: float
    upper: float
    upper_negative: float


def _bounds(low: float, high: float, clip_ratio_c: float, dtype: torch.dtype) -> _Bounds:
    """Return the bounds of one side; finite, also for an infinite range."""
    largest = torch.finfo(dtype).max
    return _Bounds(1.0 - low, min(1.0 + high, largest), min(clip_ratio_c, largest))


def _no_bounds(dtype: torch.dtype) -> _Bounds:
    """Return bounds that only clamp an overflowing ratio."""
    largest = torch.finfo(dtype).max
    return _Bounds(0.0, largest, largest)


class _TokenTerms(NamedTuple):
    """[B, R]: losses, their derivative by log_prob, and r. Scalars: tokens of each side changed by a bound."""

    losses: Tensor
    derivative: Tensor
    ratio: Tensor
    on_clipped: Tensor
    on_clipped_lower: Tensor
    off_clipped: Tensor
    off_clipped_lower: Tensor


def _token_terms(
    log_ratio: Tensor,
    advantage: Tensor,
    on: Tensor,
    off: Tensor,
    on_bounds: _Bounds,
    off_bounds: _Bounds,
    shaping: float | None,
) -> _TokenTerms:
    """Evaluate the module's formula and its derivative. All tensors [B, R]; ``on`` and ``off`` hold 0 and 1.

    Masks are numbers and branches are products with them: on a CPU ``torch.where`` over scattered masks takes twenty
    times as long. Every factor of such a product is finite (or NaN, which must propagate). To halve the memory, results
    overwrite inputs that are no longer needed, including ``log_ratio`` and ``advantage``.
    """
    # r / (r + gamma) = sigmoid(log r - log gamma), which is correct even if r overflows.
    shaped = None if shaping is None else torch.sigmoid(log_ratio - math.log(shaping)).mul_(off)
    ratio = log_ratio.exp_()
    factor = ratio if shaped is None else ratio.clamp(max=torch.finfo(ratio.dtype).max).mul_(on).add_(shaped)
    negative = _below_zero(advantage)
    lo, hi = _intervals(negative, on, off, on_bounds, off_bounds)
    losses = factor.clamp(lo, hi).mul_(0.0 - advantage)
    under, over = lo.gt_(factor), hi.lt_(factor)
    derivative = (1.0 - under).sub_(over).mul_(losses)
    if shaped is not None:
        derivative.mul_(1.0 - shaped)
    clipped_lower = negative.mul_(over)
    clipped = over.mul_(advantage.gt_(0.0)).add_(under)
    return _TokenTerms(
        losses,
        derivative,
        ratio,
        on_clipped=(clipped * on).sum(),
        on_clipped_lower=(clipped_lower * on).sum(),
        off_clipped=(clipped * off).sum(),
        off_clipped_lower=(clipped_lower * off).sum(),
    )


def _intervals(
    negative: Tensor, on: Tensor, off: Tensor, on_bounds: _Bounds, off_bounds: _Bounds
) -> tuple[Tensor, Tensor]:
    """Return ``lo`` and ``hi`` of every token, [B, R]; both 0 where a token is on neither side."""

    def by_side(on_bound: float, off_bound: float) -> Tensor:
        return (on * on_bound).add_(off, alpha=off_bound)

    lo = by_side(on_bounds.lower, off_bounds.lower).mul_(negative)
    hi = by_side(on_bounds.upper_negative, off_bounds.upper_negative).mul_(negative)
    hi += by_side(on_bounds.upper, off_bounds.upper).mul_(1.0 - negative)
    return lo, hi


class _WithDerivative(torch.autograd.Function):
    """Defines already computed values as a function of ``x`` with an already computed derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (derivative,) = ctx.saved_tensors
        return gradient * derivative, None, None


_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}


def _zero_unless(values: Tensor, keep: Tensor) -> Tensor:
    """Return ``values`` where ``keep`` (bool), else 0 (even for NaN), by a bitwise "and", fast for any pattern."""
    integer = _INTEGER_OF[values.dtype]
    bits = _as_bytes(keep).to(integer).neg_()
    return (values.view(integer) & bits).view(values.dtype)


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as 0 and 1, through uint8 since torch converts bool to float slowly."""
    return _as_bytes(mask).to(dtype)


def _as_bytes(mask: Tensor) -> Tensor:
    """Return a bool mask as uint8: a view, or a conversion in compiled code, since Inductor cannot view bool."""
    return mask.to(torch.uint8) if torch.compiler.is_compiling() else mask.view(torch.uint8)


def _below_zero(values: Tensor) -> Tensor:
    """Return 1 where ``values`` is negative, else 0, in its dtype."""
    return values.clone().lt_(0.0)


def _count(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the number of true entries of a bool mask, at least 1, as a scalar of ``dtype``."""
    return mask.sum().clamp_(min=1).to(dtype)


def _check_parameters(
    low: float, high: float, off_high: float, clip_ratio_c: float, off_policy_shaping: float | None
) -> None:
    for name, value in (("cliprange_low", low), ("cliprange_high", high), ("off_cliprange_high", off_high)):
        if not value >= 0.0:
            raise ConfigurationError(f"{name}: {value}, must be at least 0")
    if not clip_ratio_c >= 1.0:
        raise ConfigurationError(f"clip_ratio_c: {clip_ratio_c}, must be at least 1: it bounds the ratio from above")
    if off_policy_shaping is not None and not 0.0 < off_policy_shaping < math.inf:
        raise ConfigurationError(f"off_policy_shaping: {off_policy_shaping}, must be positive and finite, or None")


def _check_shapes(log_prob: Tensor, **others: Tensor) -> None:
    if log_prob.dim() != 2:
        raise ConfigurationError(f"log_prob: shape {list(log_prob.shape)}, must be [B, R]")
    for name, tensor in others.items():
        if tensor.shape != log_prob.shape:
            raise ConfigurationError(
                f"{name}: shape {list(tensor.shape)}, must be [B, R] = {list(log_prob.shape)} as log_prob"
            )
