"""Messages, calls of models and metadata in the JSON documents of rollouts, as columns."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import orjson

from trajstore._core.base.types import IntArray
from trajstore._core.columns.facts import SESSION, session_of
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, CorruptStoreError, listed
from trajstore.query.engine import pl
from trajstore.query.readable import Locked, of_documents
from trajstore.query.texts import METADATA, Path

logger = logging.getLogger(__name__)

Object = Mapping[str, Any]

Rollouts = Sequence[Sequence[Object]]
"""The objects of each rollout, such as its messages."""

Values = Callable[[Rollouts], Iterable[Any]]
"""Returns a column's values, one for each object."""


@dataclass(frozen=True, slots=True)
class Documents:
    """A relation whose rows are objects in the documents of rollouts.

    Attributes:
        objects: returns those of a document.
        columns: type in Polars and meaning of each column, and what returns its values.
    """

    objects: Callable[[Object], Sequence[Object]]
    columns: Mapping[str, tuple[str, str, Values]]

    @property
    def described(self) -> dict[str, tuple[str, str]]:
        """Type in Polars and meaning of each column."""
        return {name: (kind, meaning) for name, (kind, meaning, _) in self.columns.items()}

    def read(
        self, locked: Locked, ids: IntArray, names: Sequence[str], _: Mapping[str, bool]
    ) -> tuple[IntArray, dict[str, pl.Series]]:
        """Return the number of objects of each rollout, ``[n]``, and columns of all objects.

        Raises:
            TrajectoryUnavailableError: a rollout was evicted meanwhile.
            CorruptStoreError, OSError: a rollout is unreadable.
        """
        each, series = of_documents(locked, ids, self.objects), {}
        for name in names:
            kind, _meaning, values = self.columns[name]
            series[name] = pl.Series(name, values(each), dtype=getattr(pl, kind))
        return np.array([len(objects) for objects in each], np.int64), series


def text_of(value: Any) -> str | None:
    """Return a text unchanged, None as None, and anything else as JSON."""
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


def _whole(value: Any) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _real(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _of(name: str, known: Callable[[Any], Any]) -> Values:
    """Return what returns ``known`` of the values with a name, one of each object."""
    return lambda rollouts: [known(item.get(name)) for items in rollouts for item in items]


def _json(rollouts: Rollouts) -> Iterable[str]:
    return [orjson.dumps(item).decode() for items in rollouts for item in items]


# -- messages -----------------------------------------------------------------------------------------


def _messages(document: Object) -> Sequence[Object]:
    messages = document.get("messages") or []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise CorruptStoreError("its messages are not a list of objects")
    return messages


def _turns(rollouts: Rollouts) -> Iterable[int]:
    return chain.from_iterable(
        accumulate(message.get("role") == "assistant" for message in messages) for messages in rollouts
    )


def _items(message: Object, name: str) -> list[Object]:
    items = message.get(name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def calls_in(message: Object) -> list[Object]:
    """Return the tool calls of a message, in OpenAI's, inspect_ai's or Anthropic's form."""
    parts = [part for part in _items(message, "content") if part.get("type") == "tool_use"]
    return parts + _items(message, "tool_calls")


def name_of(call: Object) -> str:
    """Return the name of the tool that a call names."""
    function = call.get("function", call)
    return str(function.get("name", "a tool") if isinstance(function, dict) else function)


def arguments_of(call: Object) -> str | None:
    """Return the arguments of a call, as JSON, or the text that the model gave."""
    function = call.get("function")
    return text_of((function if isinstance(function, dict) else call).get("arguments", call.get("input")))


def calls_by_id(messages: Iterable[Object]) -> dict[str, Object]:
    """Return the calls of tools by their ids."""
    calls = (call for message in messages for call in calls_in(message))
    return {call["id"]: call for call in calls if isinstance(call.get("id"), str)}


def _answered(messages: Sequence[Object]) -> Iterable[tuple[Object, list[Object]]]:
    """Yield each message with the calls whose results it has."""
    calls = calls_by_id(messages)
    for message in messages:
        results = (part.get("tool_use_id") for part in _items(message, "content"))
        ids = (key for key in (message.get("tool_call_id"), *results) if isinstance(key, str))
        yield message, [calls[key] for key in ids if key in calls]


def _tools(rollouts: Rollouts) -> Iterable[str | None]:
    for message, calls in chain.from_iterable(map(_answered, rollouts)):
        is_named = message.get("role") in ("tool", "function") and isinstance(message.get("name"), str)
        known = ", ".join(dict.fromkeys(map(name_of, calls)))
        yield known or (message["name"] if is_named else None)


def _arguments(rollouts: Rollouts) -> Iterable[str | None]:
    for _, calls in chain.from_iterable(map(_answered, rollouts)):
        yield "\n".join(arguments_of(call) or "" for call in calls) if calls else None


MESSAGES = Documents(
    _messages,
    {
        "message": (
            "Int64",
            "its number in the rollout, from 0 on",
            lambda rollouts: chain.from_iterable(range(len(messages)) for messages in rollouts),
        ),
        "turn": ("Int64", "messages of the model up to this one, itself included: 0 before the first", _turns),
        "role": ("String", "who speaks", _of("role", text_of)),
        "content": ("String", "its text; JSON where it is no text, null where there is none", _of("content", text_of)),
        "tool_calls": ("String", "calls of tools, as JSON; null where there are none", _of("tool_calls", text_of)),
        "tool": ("String", "the tool whose result it is (several with commas); null for other messages", _tools),
        "arguments": ("String", "the arguments of that tool's call, a line for each call; else null", _arguments),
        "json": ("String", "all of the message, as JSON", _json),
    },
)


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


# -- calls of models ----------------------------------------------------------------------------------


def _calls(document: Object) -> Sequence[Object]:
    """Return the calls on the path of a session that a rollout is; of another rollout, those in its metadata."""
    metadata = document.get("metadata") or {}
    if not session_of(metadata):
        return _items(metadata, "calls")
    calls = metadata[SESSION].get("calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise CorruptStoreError(f"the calls in its metadata.{SESSION} are not a list of objects")
    return calls


CALLS = Documents(
    _calls,
    {
        "call": ("String", "its id", _of("id", text_of)),
        "number": ("Int64", "its place among the calls of the session, from 0 on", _of("number", _whole)),
        "start": ("Int64", "token of the rollout where its sampled tokens begin", _of("start", _whole)),
        "stop": ("Int64", "one past the last of them", _of("stop", _whole)),
        "policy_version": ("Int64", "training step whose weights sampled them", _of("policy_version", _whole)),
        "finish_reason": ("String", "why the model stopped", _of("finish_reason", text_of)),
        "retried": ("String", "why an attempt before was incomplete; null without one", _of("retried", text_of)),
        "message": ("Int64", "number of the message that it returned", _of("message", _whole)),
        "model": ("String", "the model that was called", _of("model", text_of)),
        "seconds": ("Float64", "how long it took", _of("seconds", _real)),
        "cost": ("Float64", "what it cost", _of("cost", _real)),
        "json": ("String", "all that the rollout's metadata has of it, as JSON", _json),
    },
)

METADATA_ROWS = Documents(
    lambda document: [document.get("metadata")],  # type: ignore[list-item]
    {"json": ("String", "metadata as JSON", _json)},
)
"""One row for each rollout."""


def with_metadata(
    facts: pl.DataFrame,
    wanted: Mapping[str, Path],
    scan: Callable[[str, pl.DataFrame], pl.LazyFrame],
    chosen: pl.DataFrame,
    reported: set[str],
) -> pl.DataFrame:
    """Return facts with values of metadata as more columns; null where a rollout has none, and for blocks of steps.

    A key that none of the rollouts has is logged as a warning, once.

    Args:
        facts: the facts.
        wanted: paths of keys, by the name of their column.
        scan: returns the rows of a relation for trajectories with these facts.
        chosen: facts of the trajectories whose metadata is read; the others get nulls.
        reported: keys that a warning has named; receives those that it names now.

    Raises:
        ConfigurationError: a value is a list or an object, or within a list; names the rollout.
    """
    rows = scan(METADATA, chosen).select("trajectory_id", "json").collect()
    documents = [orjson.loads(text) for text in rows["json"]]
    values = {name: [_value_at(document, path) for document in documents] for name, path in wanted.items()}
    for name, column in values.items():
        for number, value in zip(rows["trajectory_id"], column, strict=True):
            if isinstance(value, list):
                raise ConfigurationError(
                    f"{name}: has a list in trajectory {shown_id(number)}; name a text or a number. The table 'calls' "
                    "has a row for each object in metadata.calls"
                )
            if isinstance(value, dict):
                raise ConfigurationError(
                    f"{name}: an object in trajectory {shown_id(number)}; name one of its values, as "
                    f"{name}.KEY: it has {listed(value)}"
                )
        if documents and name not in reported and all(value is None for value in column):
            reported.add(name)
            logger.warning("%s: none of the %s rollouts that were read has it", name, f"{len(documents):,}")
    columns = {name: _column(column) for name, column in values.items()}
    return facts.join(
        pl.DataFrame({"trajectory_id": rows["trajectory_id"], **columns}),
        "trajectory_id",
        how="left",
        maintain_order="left",
    )


def _value_at(value: Any, path: Path) -> Any:
    for key in path:
        if isinstance(value, list):
            return value
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _column(values: Sequence[Any]) -> pl.Series:
    """Return a column of numbers, bools or texts; all are texts if some are."""
    types = {type(value) for value in values if value is not None}
    if str in types and len(types) > 1:
        values = [v if v is None or isinstance(v, str) else orjson.dumps(v).decode() for v in values]
    elif len(types) > 1 or any(type(value) is int and value >= 1 << 63 for value in values):
        values = [None if value is None else float(value) for value in values]
    return pl.Series(values, strict=True)
