"""Messages of rollouts as columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from trajstore._core.base.types import IntArray
from trajstore.errors import CorruptStoreError
from trajstore.query.engine import polars
from trajstore.query.readable import Locked, of_documents

if TYPE_CHECKING:
    from polars import Series

Message = Mapping[str, Any]

Rollouts = Sequence[Sequence[Message]]

COLUMNS: Mapping[str, tuple[str, str]] = {
    "message": ("Int64", "its number in the rollout, from 0 on"),
    "turn": ("Int64", "messages of the model up to this one, itself included: 0 before the first"),
    "role": ("String", "who speaks"),
    "content": ("String", "its text; JSON where it is no text, null where there is none"),
    "tool_calls": ("String", "calls of tools, as JSON; null where there are none"),
    "json": ("String", "all of the message, as JSON"),
}
"""Name, type in Polars and meaning of each column."""


def read(
    locked: Locked, ids: IntArray, names: Sequence[str], _: Mapping[str, bool]
) -> tuple[IntArray, dict[str, Series]]:
    """Return the number of messages of each rollout, ``[n]``, and columns of all messages.

    Raises:
        TrajectoryUnavailableError: a rollout was evicted meanwhile.
        CorruptStoreError, OSError: a rollout is unreadable.
    """
    return series_of(of_documents(locked, ids, _messages), names, COLUMNS, _VALUES)


def series_of(
    each: Rollouts,
    names: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    values: Mapping[str, Callable[[Rollouts], Iterable[Any]]],
) -> tuple[IntArray, dict[str, Series]]:
    """Return the number of objects of each rollout, ``[n]``, and columns of all objects.

    Args:
        each: the objects of each rollout.
        names: the wanted columns.
        columns: type in Polars by name.
        values: what returns a column's values, by name.
    """
    pl = polars()
    series = {name: pl.Series(name, values[name](each), dtype=getattr(pl, columns[name][0])) for name in names}
    return np.array([len(objects) for objects in each], np.int64), series


def _messages(document: Mapping[str, Any]) -> list[Message]:
    messages = document.get("messages") or []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise CorruptStoreError("its messages are not a list of objects")
    return messages


def image_in(part: Any) -> tuple[str, str] | None:
    """Return type and base64 text of an image that a part of a message has as data, in OpenAI's or Anthropic's form."""
    if not isinstance(part, dict):
        return None
    link, source = part.get("image_url", part.get("image")), part.get("source")
    link = link.get("url") if isinstance(link, dict) else link
    if isinstance(link, str) and (data := _IMAGE.match(link)):
        return data[1], link[data.end() :]
    if isinstance(source, dict) and isinstance(source.get("data"), str):
        kind = str(source.get("media_type"))
        return (kind, source["data"]) if kind.startswith("image/") else None
    return None


_IMAGE = re.compile("data:(image/[a-z+.-]+);base64,")


def _numbers(rollouts: Rollouts) -> Iterable[int]:
    return chain.from_iterable(range(len(messages)) for messages in rollouts)


def _turns(rollouts: Rollouts) -> Iterable[int]:
    return chain.from_iterable(
        accumulate(message.get("role") == "assistant" for message in messages) for messages in rollouts
    )


def _texts(name: str) -> Callable[[Rollouts], Iterable[str | None]]:
    return lambda rollouts: [text_of(message.get(name)) for messages in rollouts for message in messages]


def text_of(value: Any) -> str | None:
    """Return a text unchanged, None as None, and anything else as JSON."""
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


_VALUES: Mapping[str, Callable[[Rollouts], Iterable[Any]]] = {
    "message": _numbers,
    "turn": _turns,
    **{name: _texts(name) for name in ("role", "content", "tool_calls")},
    "json": lambda rollouts: [orjson.dumps(message).decode() for messages in rollouts for message in messages],
}
