"""What a pass of the policy over a batch says of the rollouts in it, brought back to the rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from trainer_hooks.batch import Batch
from trajstore.errors import InvalidTrajectoryError
from trajstore.experience import mean_entropy
from trajstore.trajectory import AgentTrajectory


def completed_rollouts(
    batch: Batch, fresh: Sequence[AgentTrajectory], old_log_probs: Tensor, entropys: Tensor, policy_version: int
) -> list[AgentTrajectory]:
    """Return copies of rollouts with log-probs, entropies, response mask and policy version, on the CPU.

    Rollouts are found in the batch by task and rollout id, wherever their rows stand.

    Args:
        batch: the padded batch.
        fresh: the rollouts made; not changed.
        old_log_probs: [B, R], natural logarithm, as the policy that sampled gives them.
        entropys: [B, R], nats, under the same policy.
        policy_version: of that policy.

    Raises:
        InvalidTrajectoryError: a rollout is not in the batch, or two have the same ids.
    """
    rows = _fresh_rows(batch, fresh)
    log_probs, entropy = old_log_probs.detach().float().cpu(), entropys.detach().float().cpu()
    mask = batch.tensors["response_mask"].cpu()
    return [
        _completed(trajectory, log_probs[row], entropy[row], mask[row], policy_version)
        for trajectory, row in zip(fresh, rows, strict=True)
    ]


def _fresh_rows(batch: Batch, fresh: Sequence[AgentTrajectory]) -> list[int]:
    """Return the batch's row of each rollout, by task and rollout id."""
    rows: dict[tuple[str, str], int] = {}
    names = zip(
        batch.non_tensors["task_ids"], batch.non_tensors["rollout_ids"], batch.non_tensors["extras"], strict=True
    )
    for row, (task, rollout, extras) in enumerate(names):
        if extras["is_experience_replay"]:
            continue
        if (task, rollout) in rows:
            raise InvalidTrajectoryError(
                f"field rollout_id: {rollout!r} twice among the fresh rows of task {task!r}; give each rollout its own"
            )
        rows[task, rollout] = row
    try:
        return [rows[one.task_id, one.rollout_id] for one in fresh]
    except KeyError as error:
        raise InvalidTrajectoryError(f"rollout {error} is not among the fresh rows of the batch") from None


def _completed(
    trajectory: AgentTrajectory, log_probs: Tensor, entropys: Tensor, response_mask: Tensor, version: int
) -> AgentTrajectory:
    """Return a rollout with what the policy's pass over the batch says of it, cut to its own length."""
    length = trajectory.input_ids.numel() if trajectory.input_ids is not None else 0
    response = length - (trajectory.response_start or 0)
    return dataclasses.replace(
        trajectory,
        old_log_probs=log_probs[:response].clone(),
        entropys=entropys[:response].clone(),
        response_mask=response_mask[:response].clone(),
        entropy=mean_entropy(entropys[:response], response_mask[:response]),
        policy_version=version,
    )
