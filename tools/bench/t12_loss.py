"""T12: the mixed GRPO loss, forward and backward, over a line-by-line transcription of its formula; one thread.

Time and peak extra memory, each as a ratio, on a batch [64, 2048] float32 on the CPU. ``scattered`` draws masks and
advantages anew for every token, the worst case for branches; ``turns`` has whole replayed rows, turns of the model
between turns of the environment, and one advantage per row, as real batches do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio, torch_threads
from trainer_hooks.losses import het_compute_token_on_off_policy_loss

ROWS, TOKENS = 64, 2048
CLIP_LOW, CLIP_HIGH, OFF_CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 1.0, 3.0
TIME_TARGET, MEMORY_TARGET = 0.2, 0.5


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures of both kinds of masks."""
    with torch_threads(1):
        for masks in ("scattered", "turns"):
            batch = make_inputs(masks, options.count(ROWS), torch.Generator().manual_seed(0))
            check_equal(batch)
            memory = peak_bytes(ours, batch) / peak_bytes(transcription, batch)
            works = [partial(step, loss, batch) for loss in (ours, transcription)]
            times = in_turn(works, 3 * options.repeats, calls=5, warmup=3)
            yield Figure("T12", f"time, {masks}", ratio(*times), TIME_TARGET)
            yield Figure("T12", f"peak extra memory, {masks}", memory, MEMORY_TARGET)


class Inputs(NamedTuple):
    """Arguments of the loss, [B, R] float32; masks hold 0.0 and 1.0."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    exp_mask: Tensor


Loss = Callable[[Inputs], dict[str, Tensor]]


def transcription(batch: Inputs) -> dict[str, Tensor]:
    """Evaluate the formula as it stands, one line of torch for each of its terms."""
    log_ratio = batch.log_prob - batch.old_log_prob
    ratio = torch.exp(log_ratio)
    advantages, response_mask, exp_mask = batch.advantages, batch.response_mask, batch.exp_mask

    def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
        return (values * mask).sum() / mask.sum().clamp(min=1)

    def side(high: float, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unclipped = -advantages * ratio
        clipped = -advantages * torch.clamp(ratio, 1 - CLIP_LOW, 1 + high)
        u = torch.maximum(unclipped, clipped)
        bound = -advantages * DUAL_CLIP
        losses = torch.where(advantages < 0, torch.minimum(u, bound), u)
        fraction = masked_mean((clipped > unclipped).float(), mask)
        fraction_lower = masked_mean(((u > bound) & (advantages < 0)).float(), mask)
        return losses, fraction, fraction_lower

    on_mask, off_mask = (1 - exp_mask) * response_mask, exp_mask * response_mask
    on_losses, on_fraction, on_lower = side(CLIP_HIGH, on_mask)
    off_losses, off_fraction, off_lower = side(OFF_CLIP_HIGH, off_mask)
    losses = off_losses * exp_mask + on_losses * (1 - exp_mask)
    return {
        "pg_loss": masked_mean(losses, response_mask),
        "pg_losses": losses,
        "on_pg_losses": on_losses,
        "off_pg_losses": off_losses,
        "on_pg_loss": masked_mean(on_losses, on_mask),
        "off_pg_loss": masked_mean(off_losses, off_mask),
        "on_pg_clipfrac": on_fraction,
        "on_pg_clipfrac_lower": on_lower,
        "off_pg_clipfrac": off_fraction,
        "off_pg_clipfrac_lower": off_lower,
        "ppo_kl": masked_mean(-log_ratio, response_mask),
        "importance_ratio": ratio,
    }


def ours(batch: Inputs) -> dict[str, Tensor]:
    """Call the function that is measured."""
    return het_compute_token_on_off_policy_loss(
        *batch,
        cliprange_low=CLIP_LOW,
        cliprange_high=CLIP_HIGH,
        off_cliprange_high=OFF_CLIP_HIGH,
        clip_ratio_c=DUAL_CLIP,
    )


def make_inputs(masks: str, rows: int, generator: torch.Generator, tokens: int = TOKENS) -> Inputs:
    """Return a batch [rows, tokens]; ``masks`` is ``scattered`` or ``turns``."""
    shape = (rows, tokens)
    log_prob = -torch.rand(shape, generator=generator)
    old_log_prob = log_prob + 0.3 * torch.randn(shape, generator=generator)
    if masks == "scattered":
        advantages = torch.randn(shape, generator=generator)
        response_mask = (torch.rand(shape, generator=generator) < 0.7).float()
        exp_mask = (torch.rand(shape, generator=generator) < 0.3).float() * response_mask
    else:
        advantages = torch.randn((rows, 1), generator=generator).expand(shape).contiguous()
        position = torch.arange(tokens)
        length = torch.randint(tokens // 4, tokens + 1, (rows, 1), generator=generator)
        response_mask = ((position % 256 < 192) & (position < length)).float()
        exp_mask = (torch.rand((rows, 1), generator=generator) < 0.3).float() * response_mask
    return Inputs(old_log_prob, log_prob.requires_grad_(), advantages, response_mask, exp_mask)


def step(loss: Loss, batch: Inputs) -> None:
    """Run forward and backward once."""
    batch.log_prob.grad = None
    torch.autograd.backward(loss(batch)["pg_loss"])


def peak_bytes(loss: Loss, batch: Inputs) -> int:
    """Return the peak of allocated bytes during a step, above the allocation before it."""
    batch.log_prob.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(loss, batch)
    recorded = profiler.profiler
    if recorded is None:
        raise RuntimeError("the profiler recorded nothing")
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def check_equal(batch: Inputs) -> None:
    """Make sure that both compute the same loss and gradient.

    Raises:
        RuntimeError: they don't.
    """
    results: list[tuple[Tensor, Tensor]] = []
    for loss in (ours, transcription):
        batch.log_prob.grad = None
        value = loss(batch)["pg_loss"]
        torch.autograd.backward(value)
        if batch.log_prob.grad is None:
            raise RuntimeError("no gradient")
        results.append((value.detach(), batch.log_prob.grad.clone()))
    for mine, other in zip(*results, strict=True):
        if not torch.allclose(mine, other, rtol=1e-4, atol=1e-7):
            raise RuntimeError("loss and transcription differ: there is nothing to compare")
