"""Recording for OpenRLHF: the rollout in what an ``AgentExecutor`` returns. Written for OpenRLHF 0.11."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_hooks.integrations.rollouts import agent_trajectory, prompt_key
from trainer_hooks.plain import kept
from trajstore.trajectory import AgentTrajectory

OPENRLHF = "openrlhf"
"""Key of ``metadata`` with what else an execution returned."""

_KNOWN = ("observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores", "truncated")


def rollout_of(output: Mapping[str, Any], version: int | None = None) -> AgentTrajectory:
    """Return the rollout of an execution. The prompt ends where the first action begins.

    What else was returned, such as label, images and logs, is kept in ``metadata["openrlhf"]``, and tensors attached.

    Args:
        output: what ``AgentExecutor.execute`` returned; that of several turns does not say whether it was truncated.
        version: of the policy, which OpenRLHF does not pass to its agents.

    Raises:
        InvalidTrajectoryError: there are not as many log-probs as tokens.
    """
    tokens, ranges, log_probs = output["observation_tokens"], output["action_ranges"], output["rollout_log_probs"]
    start = ranges[0][0] if ranges else len(tokens)
    mask = [int(any(first <= at < end for first, end in ranges)) for at in range(start, len(tokens))]
    reward, score, truncated = output["reward"], output.get("scores"), output.get("truncated")
    several = isinstance(score, Mapping | list)
    others = {name: value for name, value in output.items() if name not in _KNOWN and value is not None}
    others |= {"scores": score} if several else {}
    return agent_trajectory(
        prompt_ids=tokens[:start],
        response_ids=tokens[start:],
        loss_mask=mask,
        log_probs=None if log_probs is None else log_probs[start:],
        reward=None if reward is None else float(reward),
        scores={} if score is None or several else {"score": float(score)},
        version=version,
        task_id=prompt_key(output["prompt"]),
        is_terminated=None if truncated is None else not truncated,
        metadata=kept(OPENRLHF, others)[0],
    )
