"""The Agent Trajectory Interchange Format 1.8 (``atif``): a folder of JSON documents. Does not import ``atif``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
import torch

from trajstore._core.columns.facts import GIVEN
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreNotFoundError
from trajstore.interop.formats import (
    Format,
    Item,
    Row,
    Source,
    Writer,
    append_durably,
    damaged,
    files_below,
    json_of,
    logger,
    unreadable,
)
from trajstore.interop.rollouts import rollout_of, row_of
from trajstore.query.documents import text_of
from trajstore.trajectory import AgentTrajectory

_OURS = "trajstore"
"""Key of ``extra`` with the fields that the format has no place for; of a step's, with its messages."""

_VERSION = "ATIF-v1."

_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")
"""Metrics of a step that are columns of tokens."""

_SOURCES = {"user": "user", "assistant": "agent"}


# -- writing ------------------------------------------------------------------------------------------


class _Writer(Writer):
    """Writes a file for each rollout."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0
        path.mkdir()

    def encode(self, rollout: AgentTrajectory, facts: Mapping[str, Any]) -> bytes:
        return orjson.dumps(_document(rollout))

    def append(self, encoded: Sequence[bytes]) -> None:
        for content in encoded:
            append_durably(self._path / f"{self._count:08d}.json", [content])
            self._count += 1


def _document(rollout: AgentTrajectory) -> Row:
    if not rollout.messages:
        raise InvalidTrajectoryError("has no messages, which this format needs")
    steps = list(_steps(rollout.messages))
    sampled = [step for step in steps if _is_sampled(step)]
    turns = _turns(rollout)
    sums: Row = {}
    if turns and len(sampled) == len(turns):
        for step, metrics in zip(sampled, turns, strict=True):
            step["metrics"] = metrics
        sums = {f"total_{name}": sum(turn[name] for turn in turns) for name in ("prompt_tokens", "completion_tokens")}
    tools = rollout.metadata.get("tools")
    agent: Row = {"name": str(rollout.metadata.get("agent") or "unknown"), "version": "unknown"}
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        agent["tool_definitions"] = tools
    row = row_of(replace(rollout, messages=[]), rollout.metadata.get(GIVEN, {}))
    ours = {name: value for name, value in row.items() if value not in (None, "", [], {})}
    return {
        **({"session_id": rollout.rollout_id} if rollout.rollout_id else {}),
        "schema_version": "ATIF-v1.8",
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {"total_steps": len(steps), **sums},
        "extra": {_OURS: ours},
    }


def _object(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _is_sampled(step: Mapping[str, Any]) -> bool:
    """Return whether the model made a step in this trajectory."""
    return step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _turns(rollout: AgentTrajectory) -> list[Row]:
    """Return the tokens of each turn of the model."""
    ids, mask, start = rollout.input_ids, rollout.loss_mask, rollout.response_start
    if ids is None or mask is None or start is None:
        return []
    log_probs = rollout.old_log_probs if rollout.rollout_log_probs is None else rollout.rollout_log_probs
    turns, at = [], 0
    for is_model, group in groupby(mask.bool().tolist()):
        begin, at = at, at + len(list(group))
        if is_model:
            metrics: Row = {"prompt_tokens": begin, "completion_tokens": at - begin}
            metrics |= {"prompt_token_ids": ids[:begin].tolist(), "completion_token_ids": ids[begin:at].tolist()}
            sampled = None if log_probs is None or begin < start else log_probs[begin - start : at - start].double()
            if sampled is not None and bool(sampled.isfinite().all()):
                metrics["logprobs"] = sampled.tolist()
            turns.append(metrics)
    return turns


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
        yield step if _messages(step) == group else {**step, "extra": {_OURS: group}}


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
    files = files_below(path, "json") if path.is_dir() else [path]
    if not files:
        raise StoreNotFoundError(f"{path}: has no JSON files")

    def items() -> Iterator[Item]:
        for done, file in enumerate(files, start=1):
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            try:
                members = dict(_members(json_of(file.read_bytes()), name))
            except (ValueError, OSError) as error:
                yield damaged(name, f"is no ATIF document: {error}", done)
                continue
            for key, member in members.items():
                yield Item(key, lambda key=key, member=member: _rollout(member, key), done)  # type: ignore[misc]

    return Source(items(), len(files))


def _members(document: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a document and those of its subagents, by key."""
    if not isinstance(document, dict) or not isinstance(document.get("subagent_trajectories"), list | None):
        raise ValueError("must be an object, its subagent_trajectories a list of objects")
    yield name, document
    for number, member in enumerate(document.get("subagent_trajectories") or ()):
        yield from _members(member, f"{name}: subagent {number}")


@unreadable("is no ATIF document", kind=ConfigurationError)
def _rollout(document: Mapping[str, Any], name: str) -> AgentTrajectory:
    if not str(document["schema_version"]).startswith(_VERSION):
        raise ConfigurationError(f"schema_version {document['schema_version']!r} is unknown, must be ATIF-v1")
    if not document["steps"]:
        raise ConfigurationError("has no steps")
    messages: list[Any] = []
    for number, step in enumerate(document["steps"], start=1):
        with unreadable(f"step {number}", kind=ConfigurationError):
            messages += _messages(step)
    ours = (document.get("extra") or {}).get(_OURS)
    if ours is not None:
        return rollout_of({**ours, "messages": messages})
    known = {key: document[key] for key in document if key not in ("steps", "subagent_trajectories")}
    metadata = {"atif": known, "tools": document["agent"].get("tool_definitions")}
    return AgentTrajectory(
        messages=messages,
        rollout_id=document.get("trajectory_id") or document.get("session_id") or "",
        metadata={key: value for key, value in metadata.items() if value is not None},
        **_tokens(document["steps"], name),
    )


def _messages(step: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a step."""
    originals = (step.get("extra") or {}).get(_OURS)
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
        for result in (step.get("observation") or {}).get("results") or ()
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
    start, is_whole, has_some = None, True, False
    for step in steps:
        metrics = step.get("metrics") or {}
        prompt, completion = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
        if not _is_sampled(step):
            continue
        is_known = prompt is not None and completion is not None
        if prompt is None or completion is None or prompt[: len(ids)] != ids:
            reason = "the prompt of step %s does not repeat the tokens before it" if is_known else "step %s has none"
            if is_known or any(_object(other.get("metrics")).keys() & set(_TOKENS) for other in steps):
                logger.warning(f"convert: %s: {reason}, so all tokens are left out", name, step.get("step_id"))
            return {}
        start = len(prompt) if start is None else start
        given = metrics.get("logprobs")
        has_some = has_some or given is not None
        is_whole = is_whole and given is not None and None not in given and len(given) == len(completion)
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(completion)
        log_probs += [0.0] * (len(prompt) - len(ids)) + [0.0 if value is None else value for value in given or ()]
        ids = [*prompt, *completion]
    if start is None:
        return {}
    if has_some and not is_whole:
        logger.warning("convert: %s: a step lacks logprobs, so all are left out", name)
    columns: Row = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask), "response_start": start}
    return columns | ({"rollout_log_probs": torch.tensor(log_probs[start:])} if is_whole else {})


_NOT_READ = (
    "which trajectory a subagent is embedded in",
    "keys of steps other than messages, calls, results and tokens",
)

FORMATS = (Format("atif", "rollouts", (), _NOT_READ, _read, lambda path, _: _Writer(path)),)
