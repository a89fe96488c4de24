"""Makes the rollouts of a finished session, one for each path of its tree. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore._core.sessions.tree import Call, CallTree
from trajstore.trajectory import AgentTrajectory, Reward


def path_rows(
    session_id: str, tree: CallTree, fields: Mapping[str, Any], finish: Mapping[str, Any]
) -> list[AgentTrajectory]:
    """Return a rollout for each path, from a root to a call that no other continues.

    ``loss_mask`` and ``response_mask`` are 1 on sampled tokens; of those that several paths share, only in the first
    path. ``rollout_log_probs`` are 0 where nothing was sampled, and absent if a call of the path has none;
    ``policy_version`` is the oldest that sampled, and absent if that of a call is unknown.

    Args:
        session_id: UUID of the session, as 32 hex digits.
        tree: its calls.
        fields: the rollout's fields that all paths share (``task_id``, ``rollout_id``, ...).
        finish: ``reward`` (fields of a :class:`Reward`, or None), ``is_terminated`` and ``metadata``.
    """
    leaves = list(tree.leaves())
    gaps = [described(call) for call in tree.by_id.values() if call.gap is not None]
    retried = {call.id: call.gap for call in tree.calls if call.gap is not None}
    trained: set[int] = set()
    rows = []
    for path, leaf in enumerate(leaves):
        calls = leaf.line
        mask = np.zeros(leaf.stop, np.int64)
        log_probs = np.zeros(leaf.stop, np.float32)
        for call in calls:
            mask[call.start : call.stop] = call.number not in trained
            trained.add(call.number)
            if call.log_probs is not None:
                log_probs[call.start : call.stop] = call.log_probs
        versions = [call.policy_version for call in calls if call.stop > call.start]
        known = [version for version in versions if version is not None]
        start = calls[0].start
        about = {
            "id": session_id,
            "path": path,
            "paths": len(leaves),
            "calls": [described(call, retried.get(call.id)) for call in calls],
        }
        reward = finish.get("reward")
        rows.append(
            AgentTrajectory(
                **{**fields, "metadata": {}},
                messages=leaf.conversation,
                input_ids=torch.from_numpy(leaf.tokens.astype(np.int64)),
                loss_mask=torch.from_numpy(mask),
                response_mask=torch.from_numpy(mask[start:].copy()),
                response_start=start,
                rollout_log_probs=(
                    torch.from_numpy(log_probs[start:].copy())
                    if all(call.log_probs is not None for call in calls if call.stop > call.start)
                    else None
                ),
                reward=None if reward is None else Reward(**reward),
                is_terminated=finish.get("is_terminated"),
                policy_version=min(known) if len(known) == len(versions) > 0 else None,
            )
        )
        rows[-1].metadata = {
            **fields.get("metadata", {}),
            **finish.get("metadata", {}),
            "session": about | ({"incomplete": gaps} if gaps else {}),
        }
    return rows


def row_uuids(session_id: str, count: int) -> bytes:
    """Return the UUIDs (version 5) of the rows of a session, 16 bytes each."""
    return b"".join(uuid.uuid5(uuid.UUID(session_id), str(path)).bytes for path in range(count))


def described(call: Call, retried: str | None = None) -> dict[str, Any]:
    """Return a call as the row's metadata names it, with its place among the calls of the session.

    Args:
        call: the call.
        retried: why an earlier attempt of it was incomplete; None if there was none.
    """
    known: dict[str, Any] = {"id": call.id, "number": call.number}
    if call.gap is not None:
        known["reason"] = call.gap
    else:
        known |= {"start": call.start, "stop": call.stop, "policy_version": call.policy_version}
    if call.messages:
        known["messages"] = [call.kept, call.kept + len(call.messages)]
    if call.base is not None and call.base is not call.parent:
        known |= {"base": call.base.id, "shared": call.taken}
    if retried is not None:
        known["retried"] = retried
    more = {"finish_reason": call.finish_reason, "metadata": call.metadata}
    return known | {name: value for name, value in more.items() if value}
