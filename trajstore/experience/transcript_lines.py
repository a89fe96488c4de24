"""What a line of a file of conversations holds: messages, texts, token ids; what is wrong is named. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from trajstore.errors import InvalidTrajectoryError
from trajstore.experience.conversation import ChatTemplate, is_trained

TOKEN_IDS, LOSS_MASK = "token_ids", "loss_mask"
"""Keys of a message that brings its tokens."""


def text_at(said: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a text of a line; the default where there is none."""
    value = said.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise InvalidTrajectoryError(f"{name}: {value!r}, must be a text that is not empty")
    return value


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return messages with texts as content, and the arguments of tool calls as objects."""
    if not isinstance(value, list) or not value:
        raise InvalidTrajectoryError("messages: must be a list of messages, at least one")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InvalidTrajectoryError(f"messages[{number}]: must be an object with a role")
    message = dict(value)
    if message.get("weight") not in (None, 0, 1):
        raise InvalidTrajectoryError(f"messages[{number}].weight: {message['weight']!r}, must be 0 or 1")
    if (call := message.pop("function_call", None)) is not None:  # what OpenAI had before tool_calls
        message["tool_calls"] = [{"type": "function", "function": call}]
    if message["role"] == "function":
        message["role"] = "tool"
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and isinstance(message.get("refusal"), str):
        content = message.pop("refusal")  # what the model said in the place of an answer
    if content is None and calls:
        content = ""
    elif isinstance(content, list):
        parts = [
            part.get(part["type"]) if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
            for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise InvalidTrajectoryError(
                f"messages[{number}].content: has parts that are no text; only text is replayed"
            )
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise InvalidTrajectoryError(f"messages[{number}].content: a {type(content).__name__}, must be a text")
    message["content"] = content
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidTrajectoryError(f"messages[{number}].tool_calls: must be a list")
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object: OpenAI has them as JSON, chat templates as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:  # the model wrote no JSON; templates print it as it is
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def first_query(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what the first message of a user says; empty if there is none."""
    return next((str(one["content"]) for one in messages if one["role"] == "user"), "")


def ids_of(value: Any, number: int, vocabulary: int) -> list[int]:
    """Return the ids that a message brings."""
    fine = isinstance(value, list) and all(type(one) is int and 0 <= one < vocabulary for one in value)
    if not fine:
        raise InvalidTrajectoryError(f"messages[{number}].{TOKEN_IDS}: must be a list of ids in [0, {vocabulary})")
    ids: list[int] = value
    return ids


def mask_of(
    messages: Sequence[Mapping[str, Any]], number: int, tokens: Sequence[int], template: ChatTemplate
) -> list[int]:
    """Return 1 on the tokens of a message that the model wrote: as it says, else from its header to its end mark."""
    message = messages[number]
    given = message.get(LOSS_MASK)
    if given is not None:
        if not isinstance(given, list) or len(given) != len(tokens) or any(one not in (0, 1) for one in given):
            raise InvalidTrajectoryError(
                f"messages[{number}].{LOSS_MASK}: must be 0 or 1 for each of {len(tokens)} {TOKEN_IDS}"
            )
        if any(given) and not is_trained(message):
            raise InvalidTrajectoryError(
                f"messages[{number}].{LOSS_MASK}: 1 on a message that is not the model's, or has weight 0"
            )
        return [int(one) for one in given]
    if not is_trained(message):
        return [0] * len(tokens)
    asked = list(template.header(messages[:number]))
    first = len(asked) if asked and list(tokens[: len(asked)]) == asked else 0
    special = [place for place in range(first, len(tokens)) if tokens[place] in template.special_ids]
    stop = special[-1] + 1 if special else len(tokens)
    return [int(first <= place < stop) for place in range(len(tokens))]
