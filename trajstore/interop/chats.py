"""Conversations: OpenAI's chat JSON lines (``chat``), Parquet of TRL (``trl``) and of verl (``verl``), and back.

A line of ``chat`` may have ``success`` (true or false) in place of a ``reward``. Messages in OpenAI's form
are kept as they are; :mod:`trainer_hooks.replay.message_rows` makes tokens of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from trajstore._core.columns.facts import GIVEN, RECORDED
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, TrajstoreError
from trajstore.interop.formats import (
    Format,
    Item,
    LinesWriter,
    PartsWriter,
    Row,
    Selection,
    Source,
    by_pyarrow,
    by_python,
    json_of,
    logger,
    read_lines,
    read_parquet,
)
from trajstore.interop.preferences import NO_MESSAGES, conversation, first_reply, is_pictured, schema_of
from trajstore.interop.rollouts import message_columns, message_type
from trajstore.query.documents import text_of
from trajstore.query.engine import pl
from trajstore.trajectory import AgentTrajectory, Reward

_TEXTS = ("task_id", "data_id", "rollout_id", "query")

_NOT_MESSAGES = "has no messages, which this format needs"


def _parts_of(rollout: AgentTrajectory) -> tuple[Row, dict[str, Any]]:
    """Return what each of these formats has, and the metadata."""
    if not rollout.messages:
        raise InvalidTrajectoryError(_NOT_MESSAGES)
    for number, message in enumerate(rollout.messages):
        if not isinstance(message.get("role"), str):
            raise InvalidTrajectoryError(f"messages[{number}] has no role, which this format needs")
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
        **{name: _id(part) for name in _TEXTS if (part := parts.get(name)) is not None},
    )


def _id(value: Any) -> Any:
    """Return an id; whole numbers become texts."""
    return str(int(value)) if type(value) is int or (isinstance(value, float) and value.is_integer()) else value


def _digest(value: Any) -> str:
    return blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=6).hexdigest()


def _metadata_of(value: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata from a JSON text or object, and other keys of the row that are not null."""
    metadata = _parsed("metadata", value) or {}
    if not isinstance(metadata, dict):
        raise ConfigurationError("metadata: must be an object")
    given = {name: item for name, item in others.items() if item is not None}
    if twice := sorted(name for name in metadata.keys() & given.keys() if metadata[name] != given[name]):
        raise ConfigurationError(f"{twice[0]}: has other values in the row and in its metadata; rename one")
    return metadata | given


def _parsed(name: str, value: Any) -> Any:
    """Return a value, or that of its JSON text; None for an empty text."""
    try:
        return value if not isinstance(value, str) else json_of(value) if value else None
    except ValueError as error:
        raise ConfigurationError(f"{name}: {value[:40]!r} is not JSON: {error}") from error


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
    if parts["reward"] is None and isinstance(line.get("success"), bool):
        parts["reward"] = float(line.pop("success"))
    line["tools"] = _parsed("tools", line.get("tools"))
    return _rollout_of(messages, parts, _metadata_of(line.pop("metadata", None), line))


# -- Parquet ------------------------------------------------------------------------------------------


def _messages_of(name: str, messages: Any, role: str) -> list[Any]:
    """Return messages of a Parquet column, or one message if they are a text."""
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    if not isinstance(messages, list | None):
        raise ConfigurationError(f"{name}: is a {type(messages).__name__}, must be a text or messages")
    return [
        _parsed(f"{name}[{number}].json", message["json"])
        if isinstance(message, dict) and isinstance(message.get("json"), str)
        else message
        for number, message in enumerate(messages or [])
    ]


def _write_trl(path: Path, selection: Selection) -> PartsWriter:
    pictured = is_pictured(selection.items())
    texts = dict.fromkeys(("tools", *_TEXTS, "metadata"), pl.String)
    schema = schema_of(("prompt", "completion"), pictured, {"reward": pl.Float64, **texts}, whole=True)

    def row_of(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
        parts, metadata = _parts_of(rollout)
        prompt, completion, images = conversation(rollout, pictured, whole=True)
        tools = text_of(_tools_in(metadata))
        row = {"prompt": prompt, "completion": completion, "tools": tools, **parts, "metadata": text_of(metadata)}
        return row | ({"images": images} if pictured else {})

    return PartsWriter(path, row_of, schema)


def _of_trl(row: Row) -> AgentTrajectory:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and any(isinstance(message, dict) and message.get("json") for message in prompt):
        row.pop("images", None)  # written here: they are in the messages too
    parts = {name: row.pop(name, None) for name in (*_TEXTS, "reward")}
    messages = [
        message
        for name, role in (("messages", "user"), ("prompt", "user"), ("completion", "assistant"))
        for message in _messages_of(name, row.pop(name, None), role)
    ]
    row["tools"] = _parsed("tools", row.get("tools"))
    return _rollout_of(messages, parts, _metadata_of(row.pop("metadata", None), row))


def _verl_row(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    parts, metadata = _parts_of(rollout)
    messages = [message_columns(message) for message in rollout.messages]
    source, colon, index = parts.pop("task_id").rpartition(":")
    return {
        "data_source": source if colon else index,
        "prompt": messages[: first_reply(rollout)],
        "messages": messages,
        "ability": text_of(metadata.get("ability")),
        "reward_model": {"style": "rule", "ground_truth": text_of(metadata.get("ground_truth"))},
        "reward": parts.pop("reward"),
        "extra_info": {"index": index if colon else None, **parts, "metadata": text_of(metadata)},
    }


def _of_verl(row: Row, ambiguous: Collection[str] = ()) -> AgentTrajectory:
    """Return the rollout of a row. Without an index, or with that of another prompt, the task has the prompt's digest.

    Args:
        row: of the file.
        ambiguous: tasks by source and index that are those of several prompts.
    """
    extra = dict(_parsed("extra_info", row.pop("extra_info", None)) or {})
    index, source = extra.pop("index", None), row.pop("data_source", None) or ""
    prompt, messages = row.pop("prompt", None), row.pop("messages", None)
    parts = {name: extra.pop(name, None) for name in _TEXTS}
    own = extra.pop("metadata", None)
    is_own = isinstance(own, str)  # written here, with the task's whole name
    task = source if index is None else f"{source}:{_id(index)}"
    if not is_own and (index is None or task in ambiguous):
        task = ":".join(filter(None, [task, _digest(prompt or messages)]))
    parts |= {"reward": row.pop("reward", None), "task_id": task}
    model = {name: item for name, item in (row.pop("reward_model", None) or {}).items() if name != "style"}
    row["ground_truth"], row["reward_model"] = model.pop("ground_truth", None), model or None
    if is_own:  # the metadata has these two already
        del row["ground_truth"]
        row.pop("ability", None)
    metadata = _metadata_of(own, _metadata_of(extra, row))
    return _rollout_of(_messages_of("messages", messages or prompt, "user"), parts, metadata)


def _read_verl(path: Path, **options: Any) -> Source:
    """Return the rows of prompts or rollouts; read twice, first for the names of their tasks."""
    tasks: dict[str, set[str]] = {}
    unnamed = 0

    def look(row: Row) -> AgentTrajectory:
        nonlocal unnamed
        extra = _parsed("extra_info", row.get("extra_info")) or {}
        if isinstance(extra.get("metadata"), str):
            pass
        elif extra.get("index") is None:
            unnamed += 1
        else:
            prompts = tasks.setdefault(f"{row.get('data_source') or ''}:{_id(extra['index'])}", set())
            if len(prompts) < 2:
                prompts.add(_digest(row.get("prompt") or row.get("messages")))
        return AgentTrajectory()

    def items() -> Iterator[Item]:
        for item in read_parquet(path, look, plain=True, **options).items:
            with suppress(TrajstoreError):  # named when it is converted
                item.load()
        ambiguous = {task for task, prompts in tasks.items() if len(prompts) > 1}
        for count, what in ((unnamed, "rows have no extra_info.index"), (len(ambiguous), "tasks have several prompts")):
            if count:
                logger.warning("convert: %s: %d %s; a digest of the prompt is in their names", path, count, what)
        yield from read_parquet(path, partial(_of_verl, ambiguous=ambiguous), plain=True, **options).items

    return Source(items(), read_parquet(path, look).total)


_read_chat = partial(read_lines, trajectory_of=_of_line)
_read_trl = partial(read_parquet, trajectory_of=_of_trl, plain=True)


def _write_chat(path: Path, _: Selection) -> LinesWriter:
    return LinesWriter(path, _line_of)


def _write_verl(path: Path, _: Selection) -> PartsWriter:
    messages = pl.List(message_type())
    extra = ("index", "data_id", "rollout_id", "query", "metadata")
    schema = {
        "data_source": pl.String,
        "prompt": messages,
        "messages": messages,
        "ability": pl.String,
        "reward_model": pl.Struct({"style": pl.String, "ground_truth": pl.String}),
        "extra_info": pl.Struct(dict.fromkeys(extra, pl.String)),
        "reward": pl.Float64,
    }
    return PartsWriter(path, _verl_row, schema)


_NOT_READ = ("reward_model.style",)

FORMATS = (
    Format("chat", "rollouts", NO_MESSAGES, (), _read_chat, _write_chat, by_python(_read_chat), thoughts=False),
    Format("trl", "rollouts", NO_MESSAGES, (), _read_trl, _write_trl, by_pyarrow(_read_trl), thoughts=True),
    Format("verl", "rollouts", NO_MESSAGES, _NOT_READ, _read_verl, _write_verl, by_pyarrow(_read_verl), thoughts=True),
)
