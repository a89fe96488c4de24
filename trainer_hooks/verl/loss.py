"""The policy loss ``het`` in verl's actor, and the wrapper that passes it the mask of replayed tokens.

verl passes a registered policy loss a fixed set of tensors without ``exp_mask``; only the loss function of a worker
gets the whole micro-batch. So :func:`het_ppo_loss` stores the mask in a context variable and calls verl's ``ppo_loss``
(with its entropy and KL terms), which calls :func:`het_policy_loss`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss

from trainer_hooks.losses import LossOptions, het_compute_token_on_off_policy_loss
from trainer_hooks.metrics import EXTREMES, SUMS, figures_of, token_sums
from trajstore.errors import ConfigurationError

LOSS_MODE = "het"
"""Name of the loss for ``actor_rollout_ref.actor.policy_loss.loss_mode``."""

EXP_MASK = "exp_mask"
"""Column of the data plane: ``[R]`` int64 per row, 1 on replayed tokens."""

FIGURES = "experience_replay/loss/"
"""Name prefix of a micro-batch's sums and extremes; :func:`take_figures` turns them into metrics."""


@dataclass(slots=True)
class _Call:
    """Inputs and outputs of one call of the loss that verl's interface lacks."""

    exp_mask: Tensor
    options: LossOptions
    figures: dict[str, Metric]


_call: ContextVar[_Call | None] = ContextVar("het_ppo_loss", default=None)


def het_ppo_loss(
    config: Any, model_output: Any, data: TensorDict, dp_group: Any = None, *, options: LossOptions
) -> tuple[Tensor, dict[str, Any]]:
    """Return verl's PPO loss of a micro-batch with the policy loss ``het``, and its metrics.

    Args:
        config: verl's ``ActorConfig``.
        model_output: output of the engine.
        data: micro-batch of B rows; must have the column ``exp_mask``.
        dp_group: passed to ``ppo_loss``.
        options: options of the het loss.

    Raises:
        ConfigurationError: the micro-batch has no ``exp_mask``.
    """
    if data.get(EXP_MASK, None) is None:
        raise ConfigurationError(
            f"{EXP_MASK}: the micro-batch has no such column. The data plane drops a column that a single row of the"
            " batch lacks: whatever adds rows (sampler, agent loop) must write it on each of them"
        )
    call = _Call(align(data[EXP_MASK], data["response_mask"]), options, {})
    token = _call.set(call)
    try:
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    finally:
        _call.reset(token)
    return loss, {**metrics, **call.figures}


@register_policy_loss(LOSS_MODE)  # type: ignore[untyped-decorator]
def het_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the heterogeneous loss, aggregated as in verl over ranks and micro-batches; tensors are [B, R].

    Raises:
        ConfigurationError: not called through :func:`het_ppo_loss`.
    """
    call = _call.get()
    if call is None:
        raise ConfigurationError(
            f"policy_loss.loss_mode={LOSS_MODE} needs a replay trainer (trainer.v1.trainer_mode=sync_replay),"
            " which hands it the mask of replayed tokens"
        )
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    terms = het_compute_token_on_off_policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        call.exp_mask,
        cliprange_low=low,
        cliprange_high=high,
        clip_ratio_c=config.get("clip_ratio_c", 3.0),
        **call.options,
    )
    losses = terms["pg_losses"] if rollout_is_weights is None else terms["pg_losses"] * rollout_is_weights
    # verl divides by the tokens or rows of the whole batch over all ranks, which only verl knows.
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    sums = token_sums(terms, response_mask, call.exp_mask)
    call.figures.update(_figures(sums))
    tokens = max(sums["on_tokens"] + sums["off_tokens"], 1.0)
    return loss, {
        "actor/pg_clipfrac": (sums["on_pg_clipfrac"] + sums["off_pg_clipfrac"]) / tokens,
        "actor/ppo_kl": terms["ppo_kl"].item(),
        "actor/pg_clipfrac_lower": (sums["on_pg_clipfrac_lower"] + sums["off_pg_clipfrac_lower"]) / tokens,
    }


def align(exp_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Return a mask as [B, R] int64, R = longest response; each row is cut or zero-padded to its response.

    verl's padding rows are copies of the first row: they have its mask, but a response of one token.

    Args:
        exp_mask: B rows, jagged or [B, any].
        response_mask: B rows, jagged or [B, R].
    """
    rows = [row.numel() for row in response_mask.unbind()]
    result = torch.zeros(len(rows), max(rows), dtype=torch.int64, device=exp_mask.device)
    for row, (mask, length) in enumerate(zip(exp_mask.unbind(), rows, strict=True)):
        count = min(length, mask.numel())
        result[row, :count] = mask[:count]
    return result


def take_figures(metrics: dict[str, Any]) -> dict[str, float]:
    """Remove the reported sums of all micro-batches and ranks from ``metrics``; return their figures.

    The figures are defined in ``trainer_hooks.metrics``.

    Args:
        metrics: verl's metrics of an actor update; changed. verl averages sums over the mini-batches, combines
            extremes, and prefixes names with ``actor/``.
    """
    reported = {name: metrics.pop(f"actor/{FIGURES}{name}", None) for name in (*SUMS, *EXTREMES)}
    return figures_of({name: float(value) for name, value in reported.items() if value is not None})


def _figures(sums: dict[str, float]) -> dict[str, Metric]:
    """Return a micro-batch's sums and extremes as metrics that verl aggregates over micro-batches and ranks.

    Reports all names even without on- or off-policy tokens, as all ranks must report the same names.
    """
    kinds = {"max": AggregationType.MAX, "min": AggregationType.MIN}
    return {
        FIGURES + name: Metric(kinds.get(name.rsplit("_", 1)[-1], AggregationType.SUM), value)
        for name, value in sums.items()
    }
