"""Facts of a rollout: the values queried most, without its messages and tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

DOCUMENT_FACTS: Mapping[str, str] = {
    "task": "task_id of the rollout, null if that is empty",
    "data_id": "data_id of the rollout",
    "rollout_id": "rollout_id of the rollout",
    "outcome": "reward.outcome",
    "success_rate": "reward.success_rate",
    "turns": "messages of the model",
    "messages": "messages in all",
    "response_start": "tokens of the prompt, as the rollout says",
    "terminated": "is_terminated of the rollout",
    "session": "id of the agent session that the rollout is a row of",
    "session_path": "number of the row among those of its session, from 0",
    "session_paths": "number of rows of its session",
    "session_calls": "calls of the model on the row's path",
}
"""Names and sources of the facts. An empty text counts as absent."""

GIVEN, RECORDED = "trajstore.notes", "trajstore.recorded"
"""Keys of a rollout's ``metadata``: all its late values, and the values of its reward that they replace."""

SCORE = "reward_"
"""Prefix of facts that are numbers or bools of ``reward.metadata``."""

OVER_FACTS = ("outcome", "success_rate")
"""Facts that a value of the same name replaces, besides those of ``reward.metadata``."""

SESSION = "session"
"""Key of ``metadata`` of a row of an agent session: its ``id``, this row's ``path``, and the number of ``paths``."""

_TEXTS = (("task", "task_id"), ("data_id", "data_id"), ("rollout_id", "rollout_id"))

_NUMBERS = (int, float, np.integer, np.floating, np.bool_)


def session_of(metadata: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """Return id, path and number of paths of the session that a rollout is a row of; None of another rollout."""
    session = metadata.get(SESSION)
    found = tuple(map(session.get, ("id", "path", "paths"))) if isinstance(session, Mapping) else ()
    match found:
        case (str(name), int(path), int(paths)) if name and 0 <= path < paths < 2**31:
            return name, path, paths
    return None


def facts_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in a document, by name; absent ones are left out.

    Args:
        document: fields of an agent trajectory that are not tensors, as given or as stored.
    """
    reward, messages = document.get("reward") or {}, document.get("messages")
    start, terminated = document.get("response_start"), document.get("is_terminated")
    facts: dict[str, Any] = {}
    for name, field in _TEXTS:
        if text := document.get(field):
            facts[name] = str(text)
    for name in ("outcome", "success_rate"):
        if (value := reward.get(name)) is not None:
            facts[name] = float(value)
    if messages:
        facts["turns"] = [message.get("role") for message in messages].count("assistant")
        facts["messages"] = len(messages)
    if start is not None:
        facts["response_start"] = int(start)
    if terminated is not None:
        facts["terminated"] = bool(terminated)
    metadata = document.get("metadata") or {}
    if session := session_of(metadata):
        facts |= zip(("session", "session_path", "session_paths"), session, strict=True)
        if isinstance(calls := metadata[SESSION].get("calls"), list | tuple):
            facts["session_calls"] = len(calls)
    for name, value in (reward.get("metadata") or {}).items():
        if isinstance(value, _NUMBERS):
            facts[f"{SCORE}{name}"] = float(value)
    return facts


def facts_to_json(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the facts of rollouts by name, one value per rollout; None where a rollout lacks one."""
    return {name: [rollout.get(name) for rollout in facts] for name in dict.fromkeys(chain.from_iterable(facts))}
