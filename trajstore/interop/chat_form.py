"""Rollouts in OpenAI's chat form, from those of Anthropic, of OpenAI's Responses and of inspect_ai."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from trajstore.query.documents import image_in, text_of
from trajstore.trajectory import AgentTrajectory

Object = dict[str, Any]

_THOUGHTS = "thoughts of the model left out"
_THINKS = ("thinking", "redacted_thinking", "reasoning")
_OF_CHAT = ("text", "image_url", "image", "input_audio", "audio_url", "video", "video_url", "file", "refusal")


def in_chat_form(rollout: AgentTrajectory, reasoning: bool) -> tuple[AgentTrajectory, Counter[str]]:
    """Return a rollout with messages and tools in OpenAI's chat form; those that have it stay as they are.

    Args:
        rollout: any rollout.
        reasoning: what the model thought becomes ``reasoning_content``; else it is left out.

    Returns:
        The rollout, and the numbers of messages in other forms, and of what has no place, by description.
    """
    counts: Counter[str] = Counter()
    messages: list[Object] = []
    joins = False
    for message in rollout.messages:
        is_item = "role" not in message
        made = _of_item(message, counts, reasoning) if is_item else _of_message(message, counts, reasoning)
        counts["messages written in OpenAI's form"] += made != [message]
        if made and messages and (is_item or joins) and made[0].get("role") == "assistant" == messages[-1].get("role"):
            messages[-1] = _joined(messages[-1], made.pop(0))
        messages += made
        joins = is_item
    metadata = dict(rollout.metadata)
    if isinstance(metadata.get("tools"), list):
        metadata["tools"] = [_tool(tool) for tool in metadata["tools"]]
    return replace(rollout, messages=messages, metadata=metadata), +counts


def _of_item(item: Object, counts: Counter[str], reasoning: bool) -> list[Object]:
    """Return the message that an item of Responses without a role is; none of one that has no place."""
    match item.get("type"):
        case "function_call":
            call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
            return [{"role": "assistant", "content": None, "tool_calls": [call]}]
        case "function_call_output":
            return [_result(item.get("call_id"), item.get("output"), counts)]
        case "reasoning":
            thought = _thought(item, counts, reasoning)
            return [{"role": "assistant", "content": None, "reasoning_content": thought}] if thought else []
        case str(kind):
            counts[f"items of type {kind!r} left out"] += 1
            return []
    return [item]


def _of_message(message: Object, counts: Counter[str], reasoning: bool) -> list[Object]:
    """Return a message in OpenAI's form, after the results of tools that it has; the message itself if it is so."""
    content, calls = message.get("content"), message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    others, parts, results, thoughts = dict(message), [], [], []
    called = [_of_inspect(call) for call in calls]
    if isinstance(message.get("function"), str) and message["role"] == "tool":  # inspect_ai's name of the tool
        others = {"name" if name == "function" else name: value for name, value in others.items()}
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind == "tool_use":
            called.append(_call(part.get("id"), part.get("name"), part.get("input")))
        elif kind == "tool_result":
            results.append(_result(part.get("tool_use_id"), part.get("content"), counts))
            counts["marks of failed results (is_error) left out"] += bool(part.get("is_error"))
        elif kind in _THINKS:
            thoughts.append(_thought(part, counts, reasoning))
        elif kind in ("input_text", "output_text"):
            parts.append({"type": "text", "text": part.get("text")})
            counts["annotations of texts left out"] += bool(part.get("annotations"))
        elif kind != "image_url" and (url := _url(part)) is not None:
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append(part)
            counts[f"parts of type {kind!r} written as they are"] += kind not in _OF_CHAT
    if parts == (content if isinstance(content, list) else []) and called == calls:
        return [others]
    if isinstance(content, list):
        is_text = len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}
        others["content"] = parts[0]["text"] if is_text else parts or None
    if called:
        others["tool_calls"] = called
    if thought := "\n\n".join(filter(None, thoughts)):
        others["reasoning_content"] = thought
    return results if results and not (parts or called or thought) else [*results, others]


def _joined(first: Object, second: Object) -> Object:
    """Return one message of the model made of two items of its answer."""
    contents = [message["content"] for message in (first, second) if message.get("content") is not None]
    thoughts = filter(None, (message.get("reasoning_content") for message in (first, second)))
    calls = [*(first.get("tool_calls") or []), *(second.get("tool_calls") or [])]
    more = {"tool_calls": calls or None, "reasoning_content": "\n\n".join(thoughts) or None}
    content = contents[0] if len(contents) == 1 else None if not contents else "\n".join(map(str, contents))
    return {**first, **second, "content": content, **{name: value for name, value in more.items() if value}}


def _call(call_id: Any, name: Any, arguments: Any) -> Object:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text_of(arguments) or "{}"}}


def _of_inspect(call: Any) -> Any:
    """Return a call whose function is a name, as inspect_ai has it, in OpenAI's form; any other as it is."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), str):
        return call
    more = {name: value for name, value in call.items() if name != "arguments" and value is not None}
    return {**more, **_call(call.get("id"), call["function"], call.get("arguments"))}


def _result(call_id: Any, content: Any, counts: Counter[str]) -> Object:
    """Return the result of a tool: its texts."""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(content, list) and isinstance(part, dict):
            kind = "images" if _url(part) is not None else f"parts of type {part.get('type')!r}"
            counts[f"{kind} in results of tools left out"] += 1
        else:
            texts.append(text_of(part) or "")
    return {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}


def _thought(part: Object, counts: Counter[str], reasoning: bool) -> str:
    """Return what the model thought, an empty text if that is left out."""
    inner = part.get("content") or part.get("summary")
    pieces = [piece.get("text") for piece in inner if isinstance(piece, dict)] if isinstance(inner, list) else []
    texts = [part.get("thinking"), part.get("reasoning"), *pieces]
    thought = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    counts[_THOUGHTS] += not (reasoning and thought)
    return thought if reasoning else ""


def _url(part: Any) -> str | None:
    """Return the address of an image, or its data as one; None if a part of a message is no image."""
    if not isinstance(part, dict):
        return None
    if (image := image_in(part)) is not None:
        return f"data:{image[0]};base64,{image[1]}"
    source, link = part.get("source"), part.get("image_url", part.get("image"))
    link = link.get("url") if isinstance(link, dict) else link
    url = source.get("url") if isinstance(source, dict) and part.get("type") == "image" else link
    return url if isinstance(url, str) else None


def _tool(tool: Any) -> Any:
    """Return a tool of Anthropic or of Responses in OpenAI's form; any other as it is."""
    if not isinstance(tool, dict) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    if "input_schema" not in tool and tool.get("type") != "function":
        return tool
    function = {"parameters" if name == "input_schema" else name: value for name, value in tool.items()}
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "type"}}
