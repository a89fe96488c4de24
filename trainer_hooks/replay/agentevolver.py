"""Converts AgentEvolver's rollouts, pickled or alive, to trajectories; no code named in a pickle is run.

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
from functools import lru_cache
from typing import Any

import torch

from trainer_hooks.plain import kept
from trainer_hooks.replay.conversation import TokenRow, with_rows
from trainer_hooks.replay.entry import llm_mask
from trainer_hooks.replay.rows import ROWS, over_rows, rows_of
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import RESPONSE_COLUMNS, AgentTrajectory, Reward

logger = logging.getLogger(__name__)

PACKAGES = ("agentevolver", "beyondagent")
"""Packages whose objects become :class:`ForeignObject`; the second is the name of AgentEvolver's earlier versions."""

LEFT_OUT = ("omegaconf", "transformers", "tokenizers", "typing", "pathlib", "antlr4")
"""Packages whose objects are ignored in such pickles."""

OTHERS = "agentevolver"
"""Key of ``metadata`` with the other attributes of a rollout."""

_KNOWN = (
    *("full_context", "grouped_steps", "steps", "metadata", "reward", "task_id", "data_id", "rollout_id", "query"),
    *("is_terminated", "config", "tokenizer", "blackout_token_combo", "max_seq_length", "max_env_output_length"),
)
"""Attributes that are fields of a trajectory or its rows, or options of the run."""

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


def from_agentevolver(rollout: Any, task: str = "") -> AgentTrajectory:
    """Return a rollout of AgentEvolver as a trajectory, with the rows that AgentEvolver itself would make.

    Log-probabilities, mask, entropy and policy version move from its metadata to the fields of the same names. The
    log-probs of a rollout with several rows are concatenated over the rows; each row gets its own part. Padding of
    their batch, which the recorded ``response_mask`` shows, is cut off.

    Args:
        rollout: of AgentEvolver (``Linear_CMT``, its subclasses, ``Trajectory``) or an :class:`AgentTrajectory`; not
            changed.
        task: its task, if it names none.

    Raises:
        InvalidTrajectoryError: it is neither, or has fields of a wrong kind.
    """
    try:
        if isinstance(rollout, AgentTrajectory):
            stated = rollout.task_id or _stated(rollout.metadata.get("task_id")) or task
            named = rollout if stated == rollout.task_id else dataclasses.replace(rollout, task_id=stated)
            return with_fields_of_metadata(named)
        fields = _fields_of(rollout)
        if not {"full_context", "steps", "metadata"} & set(fields):
            raise TypeError("it has neither full_context, steps nor metadata")
        context = fields.get("full_context")
        if context is None:
            steps = fields.get("steps") or []  # replay trains on assistant messages: these get the author ``llm``
            return _trajectory(fields, task, [_message(message) for message in steps])
        made = _trajectory(fields, task, [_said(message) for message in context])
        rows = _rows_without_experience(rollout) if made.metadata.get("experience_list") else _rows(fields)
        if len(rows) == 1:
            made = _without_padding(made, len(rows[0].input_ids) - rows[0].response_start)
        return with_rows(dataclasses.replace(made, response_mask=None), rows) if rows else made
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = type(rollout).__name__
        raise InvalidTrajectoryError(f"rollout: a {kind}, cannot be read as a trajectory: {error!r}") from error


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object, pickled or of AgentEvolver's own class."""
    fields: dict[str, Any] = value.fields if isinstance(value, ForeignObject) else vars(value)
    return fields


def _stated(name: Any) -> str:
    return "" if name is None else str(name)


def _trajectory(fields: Mapping[str, Any], task: str, messages: list[dict[str, Any]]) -> AgentTrajectory:
    """Return the fields that both kinds share, with the token columns unchanged."""
    metadata = dict(fields.get("metadata") or {})
    reward = fields.get("reward")
    values = _taken_from(metadata, (*_COLUMNS, *_SCALARS))
    others, lost = kept(OTHERS, {name: value for name, value in fields.items() if name not in _KNOWN})
    if lost := [name for name in lost if not isinstance(fields[name], torch.Tensor | bytes)]:
        _warn_of(tuple(lost))
    if others[OTHERS]:
        metadata = others | metadata
    return AgentTrajectory(
        messages=messages,
        reward=None if reward is None else _reward(_fields_of(reward)),
        task_id=_stated(metadata.pop("task_id", None)) or _stated(fields.get("task_id")) or task,
        data_id=_stated(fields.get("data_id")),
        rollout_id=_stated(fields.get("rollout_id")) or _stated(metadata.get("rollout_id")),
        query=_stated(fields.get("query")) or _stated(metadata.get("query")),
        is_terminated=fields.get("is_terminated"),
        metadata=metadata,
        **values,
    )


def with_fields_of_metadata(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory with the values that AgentEvolver keeps in ``metadata`` in the fields of the same names.

    A field that has a value keeps it. Log-probs and entropies may be of the model's tokens only (``over_rows``), or
    have the padding of their batch, which the recorded ``response_mask`` shows.
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
    if ROWS in metadata:
        return made
    if made.loss_mask is not None and made.response_start is not None:
        made = _without_padding(made, len(made.loss_mask) - made.response_start)
    mask = llm_mask(made)
    for name in absent:
        column = getattr(made, name)
        if mask is not None and name in ("old_log_probs", "rollout_log_probs", "entropys") and column is not None:
            setattr(made, name, (over_rows(column, [mask.long()]) or [column])[0])
    return made


def values_in_metadata(trajectory: AgentTrajectory) -> dict[str, Any]:
    """Return a history's values under AgentEvolver's keys of ``metadata``; inverse of :func:`with_fields_of_metadata`.

    Log-probs and mask have a value for each token of the response; with several rows they are concatenated.
    """
    rows = rows_of(trajectory)
    values: dict[str, Any] = {name: getattr(trajectory, name) for name in (*_SCALARS, "task_id", "rollout_id", "query")}
    for name, columns in (
        ("old_log_probs", [row.old_log_probs for row in rows]),
        ("response_mask", [None if (mask := llm_mask(row)) is None else mask.long() for row in rows]),
    ):
        known = [column for column in columns if column is not None]
        values[name] = torch.cat(known).tolist() if len(known) == len(columns) else None
    return {name: value for name, value in values.items() if value not in (None, "")}


def _without_padding(trajectory: AgentTrajectory, length: int) -> AgentTrajectory:
    """Return a trajectory whose columns of a padded batch are cut to the response's ``length``."""
    mask = trajectory.response_mask
    if mask is None or mask.dim() != 1 or len(mask) <= length or bool(mask[length:].any()):
        return trajectory
    padded = [name for name in RESPONSE_COLUMNS if getattr(trajectory, name) is not None]
    cut = {name: column[:length] for name in padded if len(column := getattr(trajectory, name)) == len(mask)}
    return dataclasses.replace(trajectory, **cut)


def _taken_from(metadata: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Remove values from ``metadata``; return them as fields of a trajectory."""
    values: dict[str, Any] = {}
    for name in names:
        value = metadata.pop(name, None)
        if value is not None:
            values[name] = torch.as_tensor(value, dtype=_COLUMNS[name]) if name in _COLUMNS else _SCALARS[name](value)
    return values


def _rows_without_experience(rollout: Any) -> list[TokenRow]:
    """Return the rows of a rollout that saw experience, which AgentEvolver removes from its prompt before training."""
    if isinstance(rollout, ForeignObject):
        raise ValueError("its prompt has experience that AgentEvolver trains without; only its own code removes it")
    return [TokenRow(row.input_ids, row.loss_mask, len(row.prompt_ids)) for row in rollout.group_tokenize()]


def _rows(fields: Mapping[str, Any]) -> list[TokenRow]:
    """Return the rows of a conversation; empty without recorded ids."""
    groups = fields.get("grouped_steps") or [fields["full_context"]]
    prompt = [int(token) for token in fields.get("blackout_token_combo") or []]
    rows = []
    for group in groups:
        messages = [_fields_of(message) for message in group]
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
    fields = _fields_of(message)
    return {name: str(fields.get(name, "")) for name in ("role", "content", "author")}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    author = {"author": _LLM} if message.get("role") == "assistant" else {}
    return {**author, **message}


@lru_cache
def _warn_of(names: tuple[str, ...]) -> None:
    """Warn once of attributes of an unknown kind."""
    logger.warning("AgentEvolver's rollouts: attributes that are no JSON are kept as texts: %s", ", ".join(names))


def _reward(values: Mapping[str, Any]) -> Reward:
    named = {name: values[name] for name in ("outcome", "success_rate", "description", "metadata") if name in values}
    others = {name: value for name, value in values.items() if name not in named and value}
    if others:  # madness, and those of a later version
        named["metadata"] = {**(named.get("metadata") or {}), **kept(OTHERS, others)[0][OTHERS]}
    return Reward(**named)
