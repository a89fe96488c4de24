"""The agent loop of prompts with finished rollouts, in verl's workers: returns these, and generates the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import hydra
import ray
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry, register

from trainer_hooks.metrics import score_of
from trainer_hooks.plain import restored
from trainer_hooks.replay.rows import rows_of, whole_sessions, with_usual_columns
from trainer_hooks.transfer_queue import RecorderHandle
from trainer_hooks.verl.reuse import REUSE_LOOP, Finished
from trainer_hooks.verl.rows import REUSE, ROUTES
from trajstore._core.columns.facts import SESSION, session_of
from trajstore.attachments import attached
from trajstore.errors import InvalidTrajectoryError, TrajstoreError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@register(REUSE_LOOP)
class ReusingAgentLoop:
    """Returns finished sessions from the store; runs the prompt's own loop for the others.

    Has the constructor and ``run`` of verl's ``AgentLoopBase``. A rollout that cannot be read is generated.
    """

    def __init__(self, **given: Any) -> None:
        self._given = given

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        """Return the outputs of one session."""
        finished = Finished.of_text(named.pop(REUSE))
        number = finished.sessions.get(int(named["session_id"]))
        if number is not None:
            try:
                if (rollout := await RecorderHandle().recall(number)) is not None:
                    return outputs_of(rollout)
            except (ray.exceptions.RayError, TrajstoreError) as error:
                logger.warning("rollout %d is generated again, it cannot be read: %s", number, error)
        loop = hydra.utils.instantiate(config=_agent_loop_registry[finished.loop], **self._given)
        return await loop.run(sampling_params, **named)


def outputs_of(rollout: AgentTrajectory) -> list[AgentLoopOutput]:
    """Return a stored rollout as its agent loop returned it. A reward that is no number is computed again.

    Raises:
        InvalidTrajectoryError: it has no tokens.
    """
    return [_output_of(row) for row in rows_of(rollout)]


def session_outputs(rows: Sequence[AgentTrajectory]) -> list[AgentLoopOutput]:
    """Return the rows of one finished agent session as what an agent loop returns: one output for each row.

    ``policy_version`` of its calls is verl's training step, the step whose weights sampled. A session without a reward
    is scored by verl, by its last output.

    Args:
        rows: the rollouts of the session.

    Raises:
        InvalidTrajectoryError: they are not all rows of one session, or a call lacks its policy version.
    """
    rollouts = whole_sessions(rows)
    session = session_of(rows[0].metadata) if len(rollouts) == 1 else None
    if session is None:
        raise InvalidTrajectoryError(f"rows: of {len(rollouts)} rollouts, must be those of one agent session")
    outputs = outputs_of(rollouts[0])
    for output in outputs:
        versions = [call.get("policy_version") for call in output.extra_fields[SESSION]["calls"]]
        if None in versions:
            raise InvalidTrajectoryError(
                f"session {session[0]}: a call has no policy_version; pass verl's training step"
            )
        output.extra_fields |= {"min_global_steps": min(versions) - 1, "max_global_steps": max(versions) - 1}
        if output.reward_score is None and (score := score_of(rollouts[0])) is not None:
            output.reward_score = score
            output.extra_fields["reward_extra_info"] = {}
        del output.extra_fields[REUSE]
    return outputs


def _output_of(row: AgentTrajectory) -> AgentLoopOutput:
    row, metadata = with_usual_columns(row), row.metadata
    ids, start, mask, log_probs = row.input_ids, row.response_start, row.response_mask, row.rollout_log_probs
    if ids is None or start is None or mask is None:
        raise InvalidTrajectoryError(f"rollout {row.rollout_id!r}: lacks tokens or mask")
    reward = {} if row.reward is None else row.reward.metadata
    score = reward.get("score")
    rated = isinstance(score, int | float)
    values = attached(metadata)
    routes = values.get(ROUTES)
    return AgentLoopOutput(
        prompt_ids=ids[:start].tolist(),
        response_ids=ids[start:].tolist(),
        response_mask=mask.tolist(),
        response_logprobs=None if log_probs is None else log_probs.tolist(),
        routed_experts=routes.numpy() if isinstance(routes, Tensor) else None,
        reward_score=score if rated else None,
        num_turns=int(metadata.get("num_turns", 0)),
        metrics=AgentLoopMetrics(),
        extra_fields={
            **restored(metadata.get("extra_fields", {}), values),
            **{name: metadata.get(name, []) for name in ("turn_scores", "tool_rewards")},
            **{name: metadata.get(name) for name in ("min_global_steps", "max_global_steps")},
            **({"reward_extra_info": dict(reward.get("extra", {}))} if rated else {}),
            **({SESSION: metadata[SESSION]} if session_of(metadata) else {}),
            REUSE: True,
        },
    )
