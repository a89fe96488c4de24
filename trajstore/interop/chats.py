"""Conversations: OpenAI's chat JSON lines (``chat``), Parquet of TRL (``trl``) and of verl (``verl``), and back.

Preferences as TRL trains on them: pairs of rollouts (``dpo``) and single ones (``kto``), written only.

A line of ``chat`` may have ``success`` (true or false) in place of a ``reward``. Messages in OpenAI's form
are kept as they are; :mod:`trainer_hooks.replay.message_rows` makes tokens of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
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
    damaged,
    json_of,
    logger,
    read_lines,
    read_parquet,
)
from trajstore.interop.rollouts import TENSORS, message_columns, message_type
from trajstore.query.documents import text_of
from trajstore.query.engine import pl
from trajstore.trajectory import AgentTrajectory, Reward

LIKED = 0.5
"""Outcomes above this are desirable in ``kto``."""


NO_MESSAGES = (
    *TENSORS,
    *("response_start", "is_terminated", "policy_version", "entropy", "tokenizer_fingerprint"),
    *("reward.success_rate", "reward.description", "reward.metadata", "late values"),
)
"""Fields for which conversations have no place."""


def first_reply(rollout: AgentTrajectory) -> int:
    """Return the number of the model's first message; that of all messages without one."""
    roles = [message.get("role") for message in rollout.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def conversation(rollout: AgentTrajectory, whole: bool = False) -> tuple[list[Row], list[Row]]:
    """Return the messages before the model's first one, and the others, as columns of :func:`message_type`.

    Args:
        rollout: with messages.
        whole: keep each message as JSON too, so that a content with other parts than texts may be JSON text, with a
            warning.

    Raises:
        InvalidTrajectoryError: a content has another part than a text; names it.
    """
    columns = [message_columns(message) for message in rollout.messages]
    for number, (message, column) in enumerate(zip(rollout.messages, columns, strict=True)):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        texts = [text for part in parts if isinstance(text := part.get("text") if _is_text(part) else part, str)]
        if len(texts) < len(parts) and not whole:
            raise InvalidTrajectoryError(
                f"messages[{number}]: has an image or another part that is no text; chat has it"
            )
        if len(texts) < len(parts):
            logger.warning("convert: contents with images, or with other parts that are no texts, are JSON texts")
        elif parts:
            column["content"] = "".join(texts)
        if not whole:
            del column["json"]
    split = first_reply(rollout)
    return columns[:split], columns[split:]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


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
    return {**{name: getattr(rollout, name) for name in _TEXTS}, "reward": _outcome(rollout)}, metadata


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


def _digest(value: Any, size: int = 6) -> str:
    return blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=size).hexdigest()


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


def _trl_row(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    parts, metadata = _parts_of(rollout)
    prompt, completion = conversation(rollout, whole=True)
    tools = text_of(_tools_in(metadata))
    return {"prompt": prompt, "completion": completion, "tools": tools, **parts, "metadata": text_of(metadata)}


def _write_trl(path: Path, _: Selection) -> PartsWriter:
    messages = dict.fromkeys(("prompt", "completion"), pl.List(message_type()))
    texts = dict.fromkeys(("tools", *_TEXTS, "metadata"), pl.String)
    return PartsWriter(path, _trl_row, {**messages, "reward": pl.Float64, **texts})


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


def _read_verl(path: Path) -> Source:
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
        for item in read_parquet(path, look, plain=True).items:
            with suppress(TrajstoreError):  # named when it is converted
                item.load()
        ambiguous = {task for task, prompts in tasks.items() if len(prompts) > 1}
        for count, what in ((unnamed, "rows have no extra_info.index"), (len(ambiguous), "tasks have several prompts")):
            if count:
                logger.warning("convert: %s: %d %s; a digest of the prompt is in their names", path, count, what)
        yield from read_parquet(path, partial(_of_verl, ambiguous=ambiguous), plain=True).items

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


# -- preferences --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Judged:
    """A rollout with a finite outcome and an answer.

    Attributes:
        item: loads it again.
        outcome: the one in force.
        prompt: digest of its task, prompt and tools.
        answer: digest of the messages after the prompt.
    """

    item: Item
    outcome: float
    prompt: str
    answer: str


def _judged(items: Iterable[Item], left_out: Counter[str]) -> Iterator[_Judged | Item]:
    """Yield the rollouts with an outcome and an answer, and an item for each that cannot be written."""
    for item in items:
        try:
            rollout = item.load()
            conversation(rollout)
        except (TrajstoreError, OSError) as error:
            yield damaged(item.key, str(error), item.done)
            continue
        outcome, split = _outcome(rollout), first_reply(rollout)
        if outcome is None or not math.isfinite(outcome):
            left_out["without an outcome"] += 1
        elif not 0 < split < len(rollout.messages):
            left_out["without a prompt or without an answer of the model"] += 1
        else:
            prompt = _digest([rollout.task_id, rollout.messages[:split], rollout.metadata.get("tools")], 16)
            yield _Judged(item, outcome, prompt, _digest(rollout.messages[split:], 16))


def _outcome(rollout: AgentTrajectory) -> float | None:
    return None if rollout.reward is None else rollout.reward.outcome


def _pairs(items: Iterable[Item]) -> tuple[list[Item], Counter[str]]:
    """Choose the best and the worst rollout of each task and prompt; of equal outcomes the newest.

    Returns:
        An item for each pair, which loads (chosen, rejected), and the numbers of rollouts left out by reason.
    """
    pairs: list[Item] = []
    left_out: Counter[str] = Counter()
    groups: dict[str, list[_Judged]] = {}  # by prompt: its worst and its best
    counts: Counter[str] = Counter()
    for found in _judged(items, left_out):
        if isinstance(found, Item):
            pairs.append(found)
            continue
        counts[found.prompt] += 1
        worst, best = groups.get(found.prompt, (found, found))
        groups[found.prompt] = [
            found if found.outcome <= worst.outcome else worst,
            found if found.outcome >= best.outcome else best,
        ]
    for prompt, (worst, best) in groups.items():
        if counts[prompt] == 1:
            left_out["alone with its task and prompt"] += 1
        elif worst.outcome == best.outcome:
            left_out["of the same outcome as all others of its task and prompt"] += counts[prompt]
        elif worst.answer == best.answer:
            left_out["of tasks whose best and worst answers are the same"] += counts[prompt]
        else:
            left_out["neither the best nor the worst of its task and prompt"] += counts[prompt] - 2
            names = {"chosen": best.item, "rejected": worst.item}
            facts = {f"{name}_{fact}": value for name, item in names.items() for fact, value in item.facts.items()}
            key = f"{best.item.key} over {worst.item.key.removeprefix('trajectory ')}"
            done = max(best.item.done, worst.item.done)
            pairs.append(Item(key, partial(_both, best.item, worst.item), done, facts))
    return pairs, +left_out


def _both(best: Item, worst: Item) -> Any:
    return best.load(), worst.load()


def _each(items: Iterable[Item]) -> tuple[list[Item], Counter[str]]:
    """Choose the rollouts with an outcome, see :func:`_pairs`."""
    left_out: Counter[str] = Counter()
    return [found if isinstance(found, Item) else found.item for found in _judged(items, left_out)], left_out


def _pair_row(pair: Any, facts: Mapping[str, Any]) -> Row:
    chosen, rejected = pair
    row = _columns(chosen, "chosen") | {"rejected": conversation(rejected)[1]}
    for name, one in (("chosen", chosen), ("rejected", rejected)):
        row |= {f"{name}_id": str(facts[f"{name}_trajectory_id"]), f"{name}_outcome": _outcome(one)}
    return row


def _row(rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    outcome = _outcome(rollout)
    own = {"label": outcome is not None and outcome > LIKED, "outcome": outcome}
    return {**_columns(rollout, "completion"), **own, "trajectory_id": str(facts["trajectory_id"])}


def _columns(rollout: AgentTrajectory, answer: str) -> Row:
    """Return the columns of a conversation, whose messages after the prompt are the column ``answer``."""
    prompt, messages = conversation(rollout)
    tools = text_of(rollout.metadata.get("tools"))
    return {"prompt": prompt, answer: messages, "tools": tools, "task_id": rollout.task_id}


def _write_pairs(path: Path, _: Selection) -> PartsWriter:
    messages = dict.fromkeys(("prompt", "chosen", "rejected"), pl.List(message_type(whole=False)))
    texts = dict.fromkeys(("tools", "task_id", "chosen_id", "rejected_id"), pl.String)
    outcomes = dict.fromkeys(("chosen_outcome", "rejected_outcome"), pl.Float64)
    return PartsWriter(path, _pair_row, {**messages, **texts, **outcomes})


def _write_each(path: Path, _: Selection) -> PartsWriter:
    messages = dict.fromkeys(("prompt", "completion"), pl.List(message_type(whole=False)))
    texts = dict.fromkeys(("tools", "task_id", "trajectory_id"), pl.String)
    return PartsWriter(path, _row, {**messages, "label": pl.Boolean, **texts, "outcome": pl.Float64})


_CANNOT_CARRY = (*NO_MESSAGES, "data_id", "rollout_id", "query", "metadata")

_NOT_READ = ("reward_model.style",)

FORMATS = (
    Format("chat", "rollouts", NO_MESSAGES, (), _write_chat, _read_chat, thoughts=False),
    Format("trl", "rollouts", NO_MESSAGES, (), _write_trl, _read_trl, thoughts=True),
    Format("verl", "rollouts", NO_MESSAGES, _NOT_READ, _write_verl, _read_verl, thoughts=True),
    Format("dpo", "rollouts", _CANNOT_CARRY, (), _write_pairs, choose=_pairs, thoughts=True),
    Format("kto", "rollouts", _CANNOT_CARRY, (), _write_each, choose=_each, thoughts=True),
)
