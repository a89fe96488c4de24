"""AgentEvolver's rollouts, as its own classes pickle them, as trajectories. Nothing that a pickle names is run.

Two kinds of object are known by their fields, whatever their class is called:

*Conversations with recorded tokens* (``Linear_CMT``, ``LinearThinkCMT``): ``full_context`` is the list of messages,
each with ``author``, ``role``, ``content`` and ``token_arr``, the engine's ids. ``linear``: one row, all messages up to
the model's last. ``linear_think``: ``grouped_steps`` has the messages of each model turn, earlier turns without their
thoughts, and each turn is a row. The response begins at the first message of author ``llm``. Trained on is what the
model wrote: not the generation prompt (``blackout_token_combo``), and nothing after the end-of-turn token.

*Transcripts* (``Trajectory``): ``steps`` are messages; there are no ids.

Configuration and tokenizer, which the pickles hold too, are not made.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_hooks.replay.conversation import TokenRow, with_rows
from trajstore.trajectory import AgentTrajectory, Reward

logger = logging.getLogger(__name__)

PACKAGES = ("agentevolver", "beyondagent")
"""Packages whose objects become :class:`ForeignObject`; the second is the name of AgentEvolver's earlier versions."""

LEFT_OUT = ("omegaconf", "transformers", "tokenizers", "typing", "pathlib", "antlr4")
"""Packages of which such pickles have objects that nobody needs."""

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


class ForeignObject:
    """Stands in for an object whose class is not here: only its pickled state is kept."""

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"state of type {type(state).__name__}")
        inner = state.get("__dict__")  # pydantic models pickle their fields one level down
        self.fields = inner if isinstance(inner, dict) else state


def from_agent_evolver(foreign: ForeignObject, task: str) -> AgentTrajectory:
    """Return AgentEvolver's rollout as a trajectory of ours, with the rows that its code makes of it.

    Log-probabilities, mask, entropy and policy version stand in its metadata and move to the fields of these names.
    The log-probs of a rollout with several rows are those of all rows, one after the other; each row gets its own.

    Raises:
        TypeError: the object is not of such a kind (also ValueError, KeyError, AttributeError).
    """
    context = foreign.fields.get("full_context")
    if context is None:
        steps = foreign.fields.get("steps") or []  # replay trains on assistant messages: these get the author ``llm``
        return _trajectory(foreign, task, [_message(message) for message in steps])
    made = _trajectory(foreign, task, [_said(message) for message in context])
    rows = _rows(foreign.fields)
    return with_rows(dataclasses.replace(made, response_mask=None), rows) if rows else made


def _trajectory(foreign: ForeignObject, task: str, messages: list[dict[str, Any]]) -> AgentTrajectory:
    """Return what both kinds have, by our names, with the token columns as they stand there."""
    fields = foreign.fields
    metadata = dict(fields.get("metadata") or {})
    reward = fields.get("reward")
    columns: dict[str, Any] = {
        name: torch.as_tensor(metadata.pop(name), dtype=dtype)
        for name, dtype in _COLUMNS.items()
        if metadata.get(name) is not None
    }
    stated_task = metadata.pop("task_id", fields.get("task_id"))
    return AgentTrajectory(
        messages=messages,
        reward=_reward(reward.fields) if isinstance(reward, ForeignObject) else None,
        task_id=str(stated_task) if stated_task else task,
        data_id=str(fields.get("data_id", "")),
        rollout_id=str(fields.get("rollout_id", "")),
        query=str(fields.get("query", "")),
        is_terminated=fields.get("is_terminated"),
        entropy=_optional(float, metadata.pop("entropy", None)),
        policy_version=_optional(int, metadata.pop("policy_version", None)),
        metadata=metadata,
        **columns,
    )


def _rows(fields: Mapping[str, Any]) -> list[TokenRow]:
    """Return the rows of a conversation; none without recorded ids."""
    groups = fields.get("grouped_steps") or [fields["full_context"]]
    prompt = [int(token) for token in fields.get("blackout_token_combo") or []]
    rows = []
    for group in groups:
        said = [message.fields for message in group]
        authors = [message.get("author") for message in said]
        if _LLM not in authors:
            continue
        last = len(authors) - authors[::-1].index(_LLM)  # what came after the model's last message is not trained on
        ids: list[int] = []
        mask: list[int] = []
        start = None
        for message in said[:last]:
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
    """Return 1 on the tokens of a message that the model wrote: after the generation prompt, to the end of the turn."""
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


def _optional(kind: type, value: Any) -> Any:
    return None if value is None else kind(value)
