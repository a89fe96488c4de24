"""Converts AgentEvolver's pickled rollouts to trajectories, without running code named in a pickle.

Two kinds of object are recognised by their fields, whatever their class:

*Conversations with recorded tokens* (``Linear_CMT``, ``LinearThinkCMT``): ``full_context`` is the list of messages,
each with ``author``, ``role``, ``content`` and ``token_arr``, the engine's ids. ``linear``: one row, up to the model's
last message. ``linear_think``: ``grouped_steps`` has the messages of each model turn, earlier turns without their
thoughts, and each turn is a row. The response begins at the first message of author ``llm``. Only the model's own
tokens are trained on: not the generation prompt (``blackout_token_combo``), and nothing after the end-of-turn token.

*Transcripts* (``Trajectory``): ``steps`` are messages; there are no ids.

The pickles also hold configuration and tokenizer; these are not restored.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer_hooks.replay.conversation import TokenRow, with_rows
from trainer_hooks.replay.entry import llm_mask
from trainer_hooks.replay.rows import ROWS, over_rows
from trajstore.trajectory import AgentTrajectory, Reward

logger = logging.getLogger(__name__)

PACKAGES = ("agentevolver", "beyondagent")
"""Packages whose objects become :class:`ForeignObject`; the second is the name of AgentEvolver's earlier versions."""

LEFT_OUT = ("omegaconf", "transformers", "tokenizers", "typing", "pathlib", "antlr4")
"""Packages whose objects are ignored in such pickles."""

_LLM = "llm"
_COLUMNS = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "loss_mask": torch.int64,
    "old_log_probs": torch.float32,
    "entropys": torch.float32,
    "response_mask": torch.int64,
    "rollout_log_probs": torch.float32,
}

_SCALARS: dict[str, Callable[[Any], Any]] = {"entropy": float, "policy_version": int}


class ForeignObject:
    """Placeholder for an object of an unavailable class: keeps only its pickled state."""

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"state of type {type(state).__name__}")
        inner = state.get("__dict__")  # pydantic models pickle their fields one level down
        self.fields = inner if isinstance(inner, dict) else state


def from_agent_evolver(foreign: ForeignObject, task: str) -> AgentTrajectory:
    """Return AgentEvolver's rollout as a trajectory, with the rows that AgentEvolver itself would make.

    Log-probabilities, mask, entropy and policy version move from its metadata to the fields of the same names. The
    log-probs of a rollout with several rows are concatenated over the rows; each row gets its own part.

    Raises:
        TypeError: the object is of neither kind (also ValueError, KeyError, AttributeError).
    """
    context = foreign.fields.get("full_context")
    if context is None:
        steps = foreign.fields.get("steps") or []  # replay trains on assistant messages: these get the author ``llm``
        return _trajectory(foreign, task, [_message(message) for message in steps])
    made = _trajectory(foreign, task, [_said(message) for message in context])
    rows = _rows(foreign.fields)
    return with_rows(dataclasses.replace(made, response_mask=None), rows) if rows else made


def _trajectory(foreign: ForeignObject, task: str, messages: list[dict[str, Any]]) -> AgentTrajectory:
    """Return the fields that both kinds share, with the token columns unchanged."""
    fields = foreign.fields
    metadata = dict(fields.get("metadata") or {})
    reward = fields.get("reward")
    values = _taken_from(metadata, (*_COLUMNS, *_SCALARS))
    stated_task = metadata.pop("task_id", fields.get("task_id"))
    return AgentTrajectory(
        messages=messages,
        reward=_reward(reward.fields) if isinstance(reward, ForeignObject) else None,
        task_id=str(stated_task) if stated_task else task,
        data_id=str(fields.get("data_id", "")),
        rollout_id=str(fields.get("rollout_id", "")),
        query=str(fields.get("query", "")),
        is_terminated=fields.get("is_terminated"),
        metadata=metadata,
        **values,
    )


def with_fields_of_metadata(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory with the values that AgentEvolver keeps in ``metadata`` in the fields of the same names.

    A field that has a value keeps it. Log-probs and entropies may be of the model's tokens only (``over_rows``).
    Values of a wrong kind stay in ``metadata``; the trajectory is refused for what it lacks.
    """
    absent = [name for name in (*_COLUMNS, *_SCALARS) if getattr(trajectory, name) is None]
    if not any(trajectory.metadata.get(name) is not None for name in absent):
        return trajectory
    metadata = dict(trajectory.metadata)
    try:
        made = dataclasses.replace(trajectory, **_taken_from(metadata, absent), metadata=metadata)
    except (TypeError, ValueError, RuntimeError):  # as raised by torch and by Python's conversions
        return trajectory
    mask = llm_mask(made)
    if mask is None or ROWS in metadata:
        return made
    for name in absent:
        column = getattr(made, name)
        if name in ("old_log_probs", "rollout_log_probs", "entropys") and column is not None:
            setattr(made, name, (over_rows(column, [mask.long()]) or [column])[0])
    return made


def _taken_from(metadata: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Remove values from ``metadata``; return them as fields of a trajectory."""
    values: dict[str, Any] = {}
    for name in names:
        value = metadata.pop(name, None)
        if value is not None:
            values[name] = torch.as_tensor(value, dtype=_COLUMNS[name]) if name in _COLUMNS else _SCALARS[name](value)
    return values


def _rows(fields: Mapping[str, Any]) -> list[TokenRow]:
    """Return the rows of a conversation; empty without recorded ids."""
    groups = fields.get("grouped_steps") or [fields["full_context"]]
    prompt = [int(token) for token in fields.get("blackout_token_combo") or []]
    rows = []
    for group in groups:
        messages = [message.fields for message in group]
        authors = [message.get("author") for message in messages]
        if _LLM not in authors:
            continue
        last = len(authors) - authors[::-1].index(_LLM)  # messages after the model's last are not trained on
        ids: list[int] = []
        mask: list[int] = []
        start = None
        for message in messages[:last]:
            tokens = [int(token) for token in message.get("token_arr") or []]
            if not tokens:
                return []
            if message["author"] == _LLM:
                start = len(ids) if start is None else start
                mask += _written(tokens, prompt, message.get("eos_token_id"))
            else:
                mask += [0] * len(tokens)
            ids += tokens
        rows.append(TokenRow(ids, mask, start or 0))
    return rows


def _written(tokens: Sequence[int], prompt: Sequence[int], end: int | None) -> list[int]:
    """Return a mask of the tokens that the model wrote: after the generation prompt, to the end of the turn."""
    first = len(prompt) if prompt and list(tokens[: len(prompt)]) == list(prompt) else 0
    last = len(tokens) if end is None or end not in tokens[first:] else tokens.index(end, first) + 1
    return [int(first <= place < last) for place in range(len(tokens))]


def _said(message: Any) -> dict[str, Any]:
    """Return a message of a conversation as a dict: role, content and author."""
    fields = message.fields
    return {name: str(fields.get(name, "")) for name in ("role", "content", "author")}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    author = {"author": _LLM} if message.get("role") == "assistant" else {}
    return {**author, **message}


def _reward(values: Mapping[str, Any]) -> Reward:
    return Reward(
        **{name: values[name] for name in ("outcome", "success_rate", "description", "metadata") if name in values}
    )
