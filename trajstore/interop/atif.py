"""The Agent Trajectory Interchange Format 1.8 (``atif``): a folder of JSON documents. Does not import ``atif``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
import torch

from trajstore.core.columns.facts import GIVEN
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreNotFoundError
from trajstore.interop.formats import FilesWriter, Format, Item, Row, Source, append_durably, damaged
from trajstore.interop.rollouts import rollout_of, row_of
from trajstore.query.messages import text_of
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_OURS = "trajstore"
"""Key of ``extra`` with the fields that the format has no place for."""

_SOURCES = {"user": "user", "assistant": "agent"}


# -- writing ------------------------------------------------------------------------------------------


class _Writer(FilesWriter):
    """Writes a file for each rollout; the mark is their number."""

    def __init__(self, path: Path, mark: int | None) -> None:
        self._path, self._count = path, mark or 0
        path.mkdir(exist_ok=True)
        for file in sorted(path.iterdir())[self._count :]:
            file.unlink()

    def encode(self, rollout: AgentTrajectory, facts: Mapping[str, Any]) -> bytes:
        return orjson.dumps(_document(rollout))

    def append(self, encoded: Sequence[bytes]) -> int:
        for content in encoded:
            append_durably(self._path / f"{self._count:08d}.json", [content])
            self._count += 1
        return self._count


def _document(rollout: AgentTrajectory) -> Row:
    if not rollout.messages:
        raise InvalidTrajectoryError("has no messages, which this format needs")
    steps = list(_steps(rollout.messages))
    for step, metrics in zip([step for step in steps if step["source"] == "agent"], _metrics(rollout), strict=False):
        step["metrics"] = metrics
    sums = {
        f"total_{name}": sum(step["metrics"][name] for step in steps if "metrics" in step)
        for name in ("prompt_tokens", "completion_tokens")
    }
    tools = rollout.metadata.get("tools")
    agent: Row = {"name": str(rollout.metadata.get("agent") or "unknown"), "version": "unknown"}
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        agent["tool_definitions"] = tools
    row = row_of(replace(rollout, messages=[]), rollout.metadata.get(GIVEN, {}))
    return {
        "schema_version": "ATIF-v1.8",
        **({"session_id": rollout.rollout_id} if rollout.rollout_id else {}),
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {**sums, "total_steps": len(steps)},
        "extra": {_OURS: {name: value for name, value in row.items() if value not in (None, "", [], {})}},
    }


def _metrics(rollout: AgentTrajectory) -> list[Row]:
    """Return the tokens of each turn of the model; none if there are no tokens, or another number of turns."""
    ids, mask, start = rollout.input_ids, rollout.loss_mask, rollout.response_start
    if ids is None or mask is None or start is None:
        return []
    log_probs = rollout.old_log_probs if rollout.rollout_log_probs is None else rollout.rollout_log_probs
    turns, at = [], 0
    for is_model, group in groupby(mask.bool().tolist()):
        begin, at = at, at + len(list(group))
        if is_model:
            tokens = ids[begin:at].tolist()
            metrics = {
                "prompt_tokens": begin,
                "completion_tokens": len(tokens),
                "prompt_token_ids": ids[:begin].tolist(),
            }
            metrics["completion_token_ids"] = tokens
            if (
                log_probs is not None
                and begin >= start
                and bool(log_probs[begin - start : at - start].isfinite().all())
            ):
                metrics["logprobs"] = log_probs[begin - start : at - start].double().tolist()
            turns.append(metrics)
    model = sum(message.get("role") == "assistant" for message in rollout.messages)
    return turns if len(turns) == model else []


def _steps(messages: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield steps: a message, with the results of tools that follow it."""
    groups: list[list[Mapping[str, Any]]] = []
    for message in messages:
        if message.get("role") == "tool" and groups:
            groups[-1].append(message)
        else:
            groups.append([message])
    for group in groups:
        step = _step(group)
        if _messages(step) != group:
            step["extra"] = {"messages": group}
        yield step


def _step(group: Sequence[Mapping[str, Any]]) -> Row:
    first, *results = group
    step: Row = {"source": _SOURCES.get(str(first.get("role")), "system"), "message": _content(first.get("content"))}
    calls = first.get("tool_calls")
    if step["source"] == "agent":
        if isinstance(first.get("reasoning_content"), str):
            step["reasoning_content"] = first["reasoning_content"]
        if isinstance(calls, list) and calls:
            step["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    if results:
        step["observation"] = {
            "results": [
                ({"source_call_id": call} if (call := result.get("tool_call_id")) in known else {})
                | {"content": _content(result.get("content"))}
                for result in results
            ]
        }
    return step


def _content(content: Any) -> Any:
    """Return a text, or parts if all are texts."""
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text" for part in content
    )
    return content if is_parts else text_of(content) or ""


def _call(call: Any, number: int) -> Row:
    function = call.get("function", call) if isinstance(call, dict) else {}
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    try:
        arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:  # the model's own text, which is in extra
        arguments = {"text": arguments}
    name = call.get("id") if isinstance(call, dict) else None
    return {
        "tool_call_id": name if isinstance(name, str) else f"call_{number}",
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }


# -- reading ------------------------------------------------------------------------------------------


def _read(path: Path) -> Source:
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise StoreNotFoundError(f"{path}: has no JSON files")

    def items() -> Iterator[Item]:
        for done, file in enumerate(files, start=1):
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            try:
                document = orjson.loads(file.read_bytes())
                members = dict(_members(document, name))
            except (ValueError, AttributeError, TypeError, OSError) as error:
                yield damaged(name, f"is no ATIF document: {error!r}", done)
                continue
            for key, member in members.items():
                yield Item(key, lambda key=key, member=member: _rollout(member, key), done)  # type: ignore[misc]

    return Source(items(), len(files))


def _members(document: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a document and those of its subagents, by key."""
    yield name, document
    for number, member in enumerate(document.get("subagent_trajectories") or ()):
        yield from _members(member, f"{name}: subagent {number}")


def _rollout(document: Mapping[str, Any], name: str) -> AgentTrajectory:
    try:
        if not str(document["schema_version"]).startswith("ATIF-v1."):
            raise ConfigurationError(f"schema_version {document['schema_version']!r} is unknown, must be ATIF-v1")
        messages = [message for step in document["steps"] for message in _messages(step)]
        ours = (document.get("extra") or {}).get(_OURS)
        if ours is not None:
            return rollout_of({**ours, "messages": messages})
        known = {key: document[key] for key in document if key not in ("steps", "subagent_trajectories")}
        metadata = {"atif": known, "tools": document["agent"].get("tool_definitions")}
        return AgentTrajectory(
            messages=messages,
            rollout_id=document.get("session_id") or "",
            metadata={key: value for key, value in metadata.items() if value is not None},
            **_tokens(document["steps"], name),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"is no ATIF document: {error!r}") from error


def _messages(step: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a step."""
    originals = (step.get("extra") or {}).get("messages")
    if originals is not None:
        return list(originals)
    role = "assistant" if step["source"] == "agent" else step["source"]
    message = {"role": role, "content": step["message"]}
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {"name": call["function_name"], "arguments": call["arguments"]},
            }
            for call in step["tool_calls"]
        ]
    results = [
        {"role": "tool", "content": result.get("content") or ""}
        | ({"tool_call_id": result["source_call_id"]} if result.get("source_call_id") else {})
        for result in (step.get("observation") or {}).get("results", ())
    ]
    return [message, *results]


def _tokens(steps: Sequence[Mapping[str, Any]], name: str) -> Row:
    """Return the token columns of steps, of which each prompt repeats the tokens before it.

    Steps that were copied as context have counted before, in the trajectory that made them: only their ids in the
    prompt of a later step are taken.
    """
    ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    start, is_whole = None, True
    for step in steps:
        metrics = step.get("metrics") or {}
        prompt, completion = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
        if step["source"] != "agent" or step.get("is_copied_context"):
            continue
        if prompt is None or completion is None:
            return {}
        if prompt[: len(ids)] != ids:
            logger.warning(
                "convert: %s: the prompt of step %s does not repeat the tokens before it, so all tokens are left out",
                name,
                step["step_id"],
            )
            return {}
        start = len(prompt) if start is None else start
        given = metrics.get("logprobs")
        is_whole = is_whole and given is not None and len(given) == len(completion)
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(completion)
        log_probs += [0.0] * (len(prompt) - len(ids)) + list(given or ())
        ids = [*prompt, *completion]
    if start is None:
        return {}
    columns: Row = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask), "response_start": start}
    return columns | ({"rollout_log_probs": torch.tensor(log_probs[start:])} if is_whole else {})


FORMATS = (
    Format(
        "atif",
        "rollouts",
        (),
        ("time stamps, models, efforts, call counts and costs of steps", "which trajectory a subagent belongs to"),
        _read,
        lambda path, mark, _: _Writer(path, mark),
    ),
)
