"""Works out what the loss must have seen of a run from the store alone, with nothing of the plugin's."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from trajstore import AgentTrajectory

from .runs import GROUP
from .witness import LossRow, MicroBatch

LOW = HIGH = 0.2
"""verl's clip range."""
DUAL_CLIP = 3.0


@dataclasses.dataclass(frozen=True)
class OffPolicyLoss:
    """What a run's options say of the loss of replayed tokens."""

    shaping: float | None = None
    drop_negative: bool = False
    high: float = 1.0


def check_loss_rows(
    rows: Sequence[LossRow],
    rollouts: Sequence[AgentTrajectory],
    *,
    separate: bool = False,
    loss: OffPolicyLoss | None = None,
) -> int:
    """Check every row that the loss saw against the store, every loss against its rows; return how many were replayed.

    A row is a recorded rollout, token by token, with exactly the log-probs that were recorded. All of a group asked
    the same thing. ``exp_mask`` is the response's mask where the rollout was made in another group. Advantages are
    those of GRPO over the recorded scores. Every micro-batch with counted tokens has a fresh row, and its loss is what
    the formula gives.

    Args:
        rows: all of the run.
        rollouts: those of the store that were trained on.
        separate: each replayed rollout is a group of its own.
        loss: of replayed tokens; ``None`` = the defaults.
    """
    recorded: dict[tuple[int, ...], list[AgentTrajectory]] = defaultdict(list)
    for rollout in rollouts:
        recorded[tuple(rollout.input_ids.tolist())].append(rollout)
    task_of = {rollout.metadata["uid"]: rollout.task_id for rollout in rollouts}
    groups: dict[str, list[tuple[LossRow, AgentTrajectory, bool]]] = defaultdict(list)
    micro_batches: dict[MicroBatch, list[tuple[LossRow, bool]]] = defaultdict(list)
    for row in rows:
        if not row.response_mask.any():  # by which verl fills the batch up
            continue
        uid, _, apart = row.uid.partition("-replayed-")
        written = row.response_mask.bool()
        match = [
            one for one in recorded[row.tokens] if torch.equal(one.old_log_probs[written], row.old_log_probs[written])
        ]
        assert match, f"no rollout with the tokens and log-probs of a row of group {row.uid}"
        own = [one for one in match if one.metadata["uid"] == uid and not apart]
        # Two runs that begin with the same weights may have made the same rollout of tasks with other names.
        found = next((one for one in own or match if one.task_id == task_of[uid]), match[0])
        replayed = not own
        assert bool(apart) == (replayed and separate)
        assert torch.equal(row.response_mask, found.response_mask)
        mask = row.exp_mask[: row.response.numel()]
        assert torch.equal(mask, found.response_mask if replayed else torch.zeros_like(mask))
        assert not row.exp_mask[row.response.numel() :].any()
        groups[uid].append((row, found, replayed))
        micro_batches[row.micro_batch].append((row, replayed))
    for held in groups.values():
        _check_group(held, separate=separate)
    for micro_batch, seen in micro_batches.items():
        assert not all(replayed for _, replayed in seen), "replayed rows alone made an optimizer step"
        wanted = sum(_loss(row, loss or OffPolicyLoss(), off=replayed) for row, replayed in seen)
        wanted /= micro_batch.batch_tokens
        assert math.isclose(micro_batch.loss, wanted, rel_tol=1e-3, abs_tol=1e-5), (micro_batch.loss, wanted)
    return sum(replayed for held in groups.values() for _, _, replayed in held)


def _check_group(held: Sequence[tuple[LossRow, AgentTrajectory, bool]], *, separate: bool) -> None:
    (task,) = {one.task_id for _, one, _ in held}
    asked = {tuple(row.prompt.tolist()) for row, _, _ in held}
    assert len(asked) == 1, f"a group of {task} asks two things"
    assert len(held) <= GROUP
    scores = {one.rollout_id: one.reward.metadata["score"] for _, one, _ in held if one.reward}
    together = torch.tensor([scores[one.rollout_id] for _, one, replayed in held if not (separate and replayed)])
    mean, deviation = (together.mean(), together.std() + 1e-6) if len(together) > 1 else (torch.tensor(0.0), 1.0)
    for row, one, replayed in held:
        score = scores[one.rollout_id]
        value = score if separate and replayed else float((score - mean) / deviation)
        torch.testing.assert_close(row.advantages, value * row.response_mask.float(), atol=1e-4, rtol=1e-4)


def _loss(row: LossRow, options: OffPolicyLoss, *, off: bool) -> float:
    """Return the sum of a row's token losses."""
    total = 0.0
    columns = (row.log_probs, row.old_log_probs, row.advantages, row.response_mask)
    for current, old, advantage, counts in zip(*(one.tolist() for one in columns), strict=True):
        if not counts or (off and options.drop_negative and advantage < 0):
            continue
        ratio = math.exp(current - old)
        if off and options.shaping is not None:
            ratio /= ratio + options.shaping
        high = options.high if off else HIGH
        ratio = min(ratio, 1 + high) if advantage >= 0 else min(max(ratio, 1 - LOW), DUAL_CLIP)
        total -= advantage * ratio
    return total
