"""Rows of agent sessions, built by hand from a tree of calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from trajstore.trajectory import AgentTrajectory, Reward

Call = tuple[int | None, Sequence[int], Sequence[int]]
"""Number of the parent call, or None; new tokens of the prompt; sampled tokens."""


def session_rows(
    calls: Sequence[Call], outcome: float | None, *, task_id: str = "a", rollout_id: str = "r", version: int = 1
) -> list[AgentTrajectory]:
    """Return a row for each path from a root to a leaf; the first path with a sampled token trains it.

    The log-prob of a sampled token is minus its id, divided by 1,000.
    """
    parents = {parent for parent, _, _ in calls}
    leaves = [number for number in range(len(calls)) if number not in parents]
    trained: set[int] = set()
    rows = []
    for path, leaf in enumerate(leaves):
        chain: list[int] = []
        at: int | None = leaf
        while at is not None:
            chain.insert(0, at)
            at = calls[at][0]
        ids: list[int] = []
        mask: list[int] = []
        sampled_mask: list[int] = []
        spans = []
        for number in chain:
            _, prompt, sampled = calls[number]
            ids += [*prompt, *sampled]
            mask += [0] * len(prompt) + [int(number not in trained)] * len(sampled)
            sampled_mask += [0] * len(prompt) + [1] * len(sampled)
            place = len(ids) - len(sampled), len(ids)
            known: dict[str, Any] = {"id": f"call {number}", "number": number, "policy_version": version}
            spans.append(known | {"start": place[0], "stop": place[1]})
        trained.update(chain)
        start = len(calls[chain[0]][1])
        tokens, loss_mask = torch.tensor(ids), torch.tensor(mask)
        name = hashlib.sha256(f"{task_id}/{rollout_id}/{version}".encode()).hexdigest()[:32]
        metadata: dict[str, Any] = {"session": {"id": name, "path": path, "paths": len(leaves), "calls": spans}}
        rows.append(
            AgentTrajectory(
                messages=[{"role": "user", "content": "go"}, {"role": "assistant", "content": f"{ids}"}],
                input_ids=tokens,
                loss_mask=loss_mask,
                response_start=start,
                response_mask=loss_mask[start:],
                rollout_log_probs=(-tokens / 1000 * torch.tensor(sampled_mask))[start:],
                reward=Reward(outcome=outcome),
                task_id=task_id,
                rollout_id=rollout_id,
                policy_version=version,
                metadata=metadata,
            )
        )
    return rows
