"""Recording for AReaL: the rollouts of a workflow's episodes. Written for AReaL 1.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_hooks.integrations.rollouts import agent_trajectory, prompt_key, row_of
from trainer_hooks.plain import kept
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

AREAL = "areal"
"""Key of ``metadata`` with the other tensors of an episode."""

_KNOWN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")


def rollouts_of(episode: Mapping[str, Any] | None) -> list[AgentTrajectory]:
    """Return the rollouts of an episode, one per row; none of a rejected episode.

    The prompt ends before the first token that is trained. ``policy_version`` is the oldest version of these. Other
    values of the row, such as images, are kept in ``metadata["areal"]``, and its tensors attached.

    Args:
        episode: tensors ``[B, L]`` by name, padded at the end, or interactions by id, or None.

    Raises:
        InvalidTrajectoryError: the columns of a row differ in length, or it has several rewards.
    """
    parts = [episode] if episode and "input_ids" in episode else list((episode or {}).values())
    tables = [part if isinstance(part, Mapping) else part.to_tensor_dict() for part in parts]
    return [_rollout(table, row) for table in tables for row in range(len(table["input_ids"]))]


def _rollout(table: Mapping[str, torch.Tensor], row: int) -> AgentTrajectory:
    tokens = int(table["attention_mask"][row].sum())
    ids, mask = table["input_ids"][row, :tokens], table["loss_mask"][row, :tokens]
    trained = mask.nonzero().flatten().tolist()
    start = trained[0] if trained else tokens
    others = {name: row_of(value, row, len(table["input_ids"])) for name, value in table.items() if name not in _KNOWN}
    for name, value in others.items():
        if tuple(getattr(table[name], "shape", ())[:2]) == tuple(table["input_ids"].shape):
            others[name] = value[:tokens]  # without padding
    versions = table["versions"][row, :tokens][mask.bool()].tolist() if "versions" in table else []
    if "rewards" in table and table["rewards"][row].numel() != 1:
        raise InvalidTrajectoryError(f"rewards: shape {list(table['rewards'].shape)}, must have one of each row")
    return agent_trajectory(
        prompt_ids=ids[:start],
        response_ids=ids[start:],
        loss_mask=mask[start:],
        log_probs=table["logprobs"][row, start:tokens] if "logprobs" in table else None,
        reward=float(table["rewards"][row]) if "rewards" in table else None,
        version=min((version for version in versions if version >= 0), default=None),  # -1 is unknown
        task_id=prompt_key(ids[:start].tolist()),
        metadata=kept(AREAL, others)[0] if others else {},
    )
