"""Conversations: OpenAI's chat JSON lines (``chat``), Parquet of TRL (``trl``) and of verl (``verl``), and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from trajstore.core.columns.facts import GIVEN, RECORDED
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.interop.formats import Format, LinesWriter, PartsWriter, Row, read_lines, read_parquet
from trajstore.interop.rollouts import TENSORS, message_columns, message_type
from trajstore.query.engine import polars
from trajstore.query.messages import text_of
from trajstore.trajectory import AgentTrajectory, Reward

_TEXTS = ("task_id", "data_id", "rollout_id", "query")

_CANNOT_CARRY = (
    *TENSORS,
    *("response_start", "is_terminated", "policy_version", "entropy", "tokenizer_fingerprint"),
    *("reward.success_rate", "reward.description", "reward.metadata", "late values"),
)

_NOT_MESSAGES = "has no messages, which this format needs"


def _parts_of(rollout: AgentTrajectory) -> tuple[Row, dict[str, Any]]:
    """Return what each of these formats has, and the metadata."""
    if not rollout.messages:
        raise InvalidTrajectoryError(_NOT_MESSAGES)
    metadata = {name: value for name, value in rollout.metadata.items() if name not in (GIVEN, RECORDED)}
    outcome = None if rollout.reward is None else rollout.reward.outcome
    return {**{name: getattr(rollout, name) for name in _TEXTS}, "reward": outcome}, metadata


def _rollout_of(messages: Any, parts: Mapping[str, Any], metadata: dict[str, Any]) -> AgentTrajectory:
    if not isinstance(messages, list) or not messages:
        raise ConfigurationError(_NOT_MESSAGES)
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigurationError(f"messages[{number}] is no object with a role")
    reward = parts.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise ConfigurationError(f"reward: {reward!r}, must be a number")
    return AgentTrajectory(
        messages=messages,
        reward=None if reward is None else Reward(outcome=float(reward)),
        metadata=metadata,
        **{name: parts[name] for name in _TEXTS if parts.get(name) is not None},
    )


def _metadata_of(value: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata from a JSON text or object, and other keys of the row that are not null."""
    metadata = orjson.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(metadata, dict):
        raise ConfigurationError("metadata: must be an object")
    return metadata | {name: item for name, item in others.items() if item is not None}


def _tools_in(metadata: dict[str, Any]) -> list[Any] | None:
    """Remove a list of tools from metadata and return it."""
    return metadata.pop("tools") if isinstance(metadata.get("tools"), list) else None


# -- chat ---------------------------------------------------------------------------------------------


def _line_of(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    parts, metadata = _parts_of(rollout)
    line = {"messages": rollout.messages, "tools": _tools_in(metadata), **parts, "metadata": metadata}
    return {name: value for name, value in line.items() if value not in (None, "", {})}


def _of_line(line: Row) -> AgentTrajectory:
    parts = {name: line.pop(name, None) for name in (*_TEXTS, "reward")}
    messages = line.pop("messages", None)
    return _rollout_of(messages, parts, _metadata_of(line.pop("metadata", None), line))


# -- Parquet ------------------------------------------------------------------------------------------


def _plain(messages: Any, role: str) -> list[Any]:
    """Return messages of a Parquet column: without nulls, or one message if they are a text."""
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    plain = []
    for message in messages or []:
        whole = message.get("json") if isinstance(message, dict) else None
        plain.append(orjson.loads(whole) if isinstance(whole, str) else _without_nulls(message))
    return plain


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that Parquet fills with null."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _split(rollout: AgentTrajectory) -> tuple[list[Row], list[Row]]:
    """Return the messages before the model's first one, and the others, as columns."""
    roles = [message.get("role") for message in rollout.messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    columns = [message_columns(message) for message in rollout.messages]
    return columns[:first], columns[first:]


def _trl_schema() -> dict[str, Any]:
    pl = polars()
    messages = pl.List(message_type())
    texts = dict.fromkeys(("tools", *_TEXTS, "metadata"), pl.String)
    return {"prompt": messages, "completion": messages, "reward": pl.Float64, **texts}


def _trl_row(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    parts, metadata = _parts_of(rollout)
    prompt, completion = _split(rollout)
    tools = _tools_in(metadata)
    return {"prompt": prompt, "completion": completion, "tools": text_of(tools), **parts, "metadata": text_of(metadata)}


def _of_trl(row: Row) -> AgentTrajectory:
    parts = {name: row.pop(name, None) for name in (*_TEXTS, "reward")}
    messages = [
        *_plain(row.pop("messages", None), "user"),
        *_plain(row.pop("prompt", None), "user"),
        *_plain(row.pop("completion", None), "assistant"),
    ]
    tools = row.pop("tools", None)
    row["tools"] = orjson.loads(tools) if isinstance(tools, str) else _without_nulls(tools)
    return _rollout_of(messages, parts, _metadata_of(row.pop("metadata", None), row))


def _verl_schema() -> dict[str, Any]:
    pl = polars()
    messages = pl.List(message_type())
    extra = ("index", "data_id", "rollout_id", "query", "metadata")
    return {
        "data_source": pl.String,
        "prompt": messages,
        "messages": messages,
        "ability": pl.String,
        "reward_model": pl.Struct({"style": pl.String, "ground_truth": pl.String}),
        "extra_info": pl.Struct(dict.fromkeys(extra, pl.String)),
        "reward": pl.Float64,
    }


def _verl_row(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    parts, metadata = _parts_of(rollout)
    prompt, completion = _split(rollout)
    source, colon, index = parts.pop("task_id").rpartition(":")
    return {
        "data_source": source if colon else index,
        "prompt": prompt,
        "messages": [*prompt, *completion],
        "ability": text_of(metadata.get("ability")),
        "reward_model": {"style": "rule", "ground_truth": text_of(metadata.get("ground_truth"))},
        "reward": parts.pop("reward"),
        "extra_info": {"index": index if colon else None, **parts, "metadata": text_of(metadata)},
    }


def _of_verl(row: Row) -> AgentTrajectory:
    extra = dict(row.pop("extra_info", None) or {})
    index, source = extra.pop("index", None), row.pop("data_source", None) or ""
    parts = {name: extra.pop(name, None) for name in _TEXTS}
    parts |= {"reward": row.pop("reward", None), "task_id": source if index is None else f"{source}:{index}"}
    prompt, messages = row.pop("prompt", None), row.pop("messages", None)
    own = extra.pop("metadata", None)
    model = row.pop("reward_model", None) or {}
    others = {} if isinstance(own, str) else {**row, **extra, "ground_truth": model.get("ground_truth")}
    return _rollout_of(_plain(messages or prompt, "user"), parts, _metadata_of(own, others))


FORMATS = (
    Format(
        "chat",
        "rollouts",
        _CANNOT_CARRY,
        (),
        partial(read_lines, trajectory_of=_of_line),
        lambda path, mark, _: LinesWriter(path, mark, _line_of),
    ),
    Format(
        "trl",
        "rollouts",
        _CANNOT_CARRY,
        (),
        partial(read_parquet, trajectory_of=_of_trl),
        lambda path, mark, _: PartsWriter(path, mark, _trl_row, _trl_schema()),
    ),
    Format(
        "verl",
        "rollouts",
        _CANNOT_CARRY,
        ("reward_model.style",),
        partial(read_parquet, trajectory_of=_of_verl),
        lambda path, mark, _: PartsWriter(path, mark, _verl_row, _verl_schema()),
    ),
)
