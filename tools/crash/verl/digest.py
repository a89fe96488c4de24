"""What identifies a rollout bit by bit, in the driver that makes it and on the disk that has it."""

from __future__ import annotations

import dataclasses
import hashlib

import orjson
import torch

from trajstore import AgentTrajectory

_POOL_SETS = ("entropy", "metadata", "notes")
"""Fields that the pool fills in or marks; all others are the same wherever a rollout is kept."""


def digest(trajectory: AgentTrajectory) -> str:
    """Return 32 hex digits over tokens, masks, log-probs, entropies (with their dtypes), reward, ids and versions.

    The text of the response is none of it: it is added on the way to the store.
    """
    sha = hashlib.sha256()
    for field in dataclasses.fields(trajectory):
        if field.name in _POOL_SETS:
            continue
        value = getattr(trajectory, field.name)
        if field.name == "messages":
            value = [message for message in value if "author" not in message]
        if isinstance(value, torch.Tensor):
            sha.update(f"{field.name} {value.dtype} {tuple(value.shape)} ".encode())
            sha.update(value.detach().cpu().contiguous().numpy().tobytes())
        else:
            sha.update(field.name.encode() + b" " + orjson.dumps(value, option=orjson.OPT_SORT_KEYS) + b" ")
    return sha.hexdigest()[:32]
