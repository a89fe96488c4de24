"""Masks of a padded batch: which tokens count, and which are off-policy. Torch only; pure.

A batch has B rows of P prompt and R response positions. Masks over both are [B, P + R], masks and log-probabilities of
the response [B, R].
"""

from __future__ import annotations

import torch
from torch import Tensor

from trajstore._core.base.arguments import whole
from trajstore.errors import ConfigurationError


def regularizer_masks(response_mask: Tensor, exp_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masks of the entropy term and the KL term, both [B, R] in the dtype of ``response_mask``.

    The entropy at a position is that of the whole distribution, so all tokens count. A KL estimated from the sampled
    token is that of the policy that sampled it, so only fresh tokens count.

    Args:
        response_mask: [B, R].
        exp_mask: [B, P + R] (its response part counts) or [B, R], nonzero on off-policy tokens.
    """
    off_policy = compute_response_mask(exp_mask, response_mask.shape[1]) != 0
    return response_mask, torch.where(off_policy, torch.zeros_like(response_mask), response_mask)


def compute_response_mask(mask: Tensor, response_length: int) -> Tensor:
    """Return the response's part of a mask, as a view: [B, R] of [B, P + R].

    For several turns give ``loss_mask``, so that the environment's tokens don't count; for one turn ``attention_mask``.

    Raises:
        ConfigurationError: the mask is not [B, P + R] with at least R positions.
    """
    whole("response_length", response_length, 0)
    if mask.dim() != 2 or not 0 <= response_length <= mask.shape[1]:
        raise ConfigurationError(
            f"mask: shape {list(mask.shape)}, must be [B, P + R] with R = {response_length} response positions"
        )
    return mask[:, mask.shape[1] - response_length :]


def build_exp_mask(
    loss_mask: Tensor, attention_mask: Tensor, prompt_length: int, is_experience_replay: Tensor, is_discarded: Tensor
) -> Tensor:
    """Return ``exp_mask``: 1 on off-policy tokens, [B, P + R], in the dtype of ``loss_mask``.

    A replayed row has 0 on the prompt and its loss mask on the response. Otherwise, a row whose rollout saw experience
    in its prompt that training discards has 1 on prompt and response (not on padding). Every other row has 0.

    Args:
        loss_mask: [B, P + R], 1 on the model's tokens.
        attention_mask: [B, P + R], 0 on padding.
        prompt_length: P.
        is_experience_replay: [B] bool, the row is replayed.
        is_discarded: [B] bool, the row was guided by experience, with train mode ``discard``.

    Raises:
        ConfigurationError: shapes don't fit.
    """
    whole("prompt_length", prompt_length, 0)
    if loss_mask.dim() != 2:
        raise ConfigurationError(f"loss_mask: shape {list(loss_mask.shape)}, must be [B, P + R]")
    rows, width = loss_mask.shape
    if attention_mask.shape != loss_mask.shape or not 0 <= prompt_length <= width:
        raise ConfigurationError(
            f"loss_mask, attention_mask: shapes {list(loss_mask.shape)} and {list(attention_mask.shape)}, must both "
            f"be [B, P + R] with P = {prompt_length}"
        )
    for name, flags in (("is_experience_replay", is_experience_replay), ("is_discarded", is_discarded)):
        if flags.shape != (rows,) or flags.dtype != torch.bool:
            raise ConfigurationError(f"{name}: {flags.dtype} {list(flags.shape)}, must be bool [B] with B = {rows}")
    discarded = (is_discarded & ~is_experience_replay).to(loss_mask.dtype)[:, None]
    exp_mask = attention_mask.to(loss_mask.dtype) * discarded
    replayed = is_experience_replay.to(loss_mask.dtype)[:, None]
    exp_mask[:, prompt_length:] += loss_mask[:, prompt_length:] * replayed
    return exp_mask


def replace_recorded_old_log_probs(
    old_log_probs: Tensor, recorded_old_log_probs: Tensor, recorded_mask: Tensor, exp_mask: Tensor
) -> Tensor:
    """Return the old log-probs for the importance ratio, [B, R].

    These are the recorded ones on off-policy tokens that have a record, and the current policy's everywhere else: a
    token without a record has ratio 1.

    Args:
        old_log_probs: [B, R], natural logarithm, under the current policy; not changed.
        recorded_old_log_probs: [B, R], under the policy that sampled. Any value where not recorded.
        recorded_mask: [B, R] bool, which positions have a record.
        exp_mask: [B, P + R] (its response part counts) or [B, R], nonzero on off-policy tokens.

    Raises:
        ConfigurationError: shapes don't fit.
    """
    shape = old_log_probs.shape
    for name, tensor in (("recorded_old_log_probs", recorded_old_log_probs), ("recorded_mask", recorded_mask)):
        if tensor.shape != shape:
            raise ConfigurationError(f"{name}: shape {list(tensor.shape)}, must be [B, R] = {list(shape)}")
    if exp_mask.dim() != 2 or exp_mask.shape[0] != shape[0]:
        raise ConfigurationError(f"exp_mask: shape {list(exp_mask.shape)}, must be [B, P + R] with B = {shape[0]}")
    off_policy = compute_response_mask(exp_mask, shape[1]).bool()
    return torch.where(off_policy & recorded_mask.bool(), recorded_old_log_probs, old_log_probs)
