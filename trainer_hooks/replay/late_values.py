"""Recorded rollouts with the late values of the step that trained on them, as verl's plugin reports them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer_hooks.replay.entry import mean_entropy
from trajstore._core.columns.facts import GIVEN, RECORDED
from trajstore.trajectory import AgentTrajectory

TRAINED_STEP, DROPPED_STEP, TASK_ROLLOUTS = "trained_step", "dropped_step", "task_rollouts"
"""Late values: the step that trained on a rollout, or dropped it; the number of its task's rollouts in that step."""

REUSED_BY = "reused_by"
"""Late value: id of the newest process that reused a rollout of an earlier one."""

SCORE = "reward_score"
"""Late value: the score that the trainer made advantages of."""


def with_training(rollout: AgentTrajectory) -> AgentTrajectory:
    """Return a recorded rollout with the late fields of its training in place.

    ``old_log_probs``, ``entropys`` and ``entropy`` are the actor's; where weights older than the actor's sampled, the
    log-probs are the engine's. ``metadata`` has ``step``, ``trained``, ``task_rollouts``, and ``run``, the process of
    this step; a rollout whose step did not finish has no ``trained``. One that was recorded without a score has the
    late one, and no ``token_scores``.
    """
    late: Mapping[str, Any] = rollout.metadata.get(GIVEN, {})
    trained = late.get(TRAINED_STEP)
    step = trained if trained is not None else late.get(DROPPED_STEP)
    if step is None:
        return rollout
    metadata = {name: value for name, value in rollout.metadata.items() if name not in (GIVEN, RECORDED)}
    if rollout.metadata.get(RECORDED, {}).get(SCORE, 0.0) is None:
        metadata.pop("token_scores", None)
    metadata |= {"step": int(step), "trained": trained is not None}
    metadata["run"] = late.get(REUSED_BY, metadata.get("run", ""))
    if late.get(TASK_ROLLOUTS) is not None:
        metadata["task_rollouts"] = int(late[TASK_ROLLOUTS])
    result = dataclasses.replace(rollout, metadata=metadata, notes={})
    if result.policy_version is not None:
        result.policy_version = min(result.policy_version, int(step))
    if trained is None:
        return result
    result.entropys = rollout.notes.get("entropys")
    if result.entropys is not None and result.response_mask is not None:
        result.entropy = mean_entropy(result.entropys, result.response_mask)
    lags = result.policy_version is not None and result.policy_version < int(step)
    engine: Tensor | None = rollout.rollout_log_probs
    result.old_log_probs = engine if lags and engine is not None else rollout.notes.get("old_log_probs")
    return result
