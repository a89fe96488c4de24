"""Messages, calls of agent sessions and metadata in the JSON documents of rollouts, as columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from trajstore._core.base.types import IntArray
from trajstore._core.columns.facts import SESSION, session_of
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, CorruptStoreError, listed
from trajstore.query.engine import polars
from trajstore.query.readable import Locked, of_documents
from trajstore.query.texts import METADATA, Path

if TYPE_CHECKING:
    from polars import DataFrame, LazyFrame, Series

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
    ) -> tuple[IntArray, dict[str, Series]]:
        """Return the number of objects of each rollout, ``[n]``, and columns of all objects.

        Raises:
            TrajectoryUnavailableError: a rollout was evicted meanwhile.
            CorruptStoreError, OSError: a rollout is unreadable.
        """
        pl, each, series = polars(), of_documents(locked, ids, self.objects), {}
        for name in names:
            kind, _meaning, values = self.columns[name]
            series[name] = pl.Series(name, values(each), dtype=getattr(pl, kind))
        return np.array([len(objects) for objects in each], np.int64), series


def text_of(value: Any) -> str | None:
    """Return a text unchanged, None as None, and anything else as JSON."""
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


def _text(name: str) -> Values:
    return lambda rollouts: [text_of(item.get(name)) for items in rollouts for item in items]


def _number(name: str) -> Values:
    def known(value: Any) -> int | None:
        return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None

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


MESSAGES = Documents(
    _messages,
    {
        "message": (
            "Int64",
            "its number in the rollout, from 0 on",
            lambda rollouts: chain.from_iterable(range(len(messages)) for messages in rollouts),
        ),
        "turn": ("Int64", "messages of the model up to this one, itself included: 0 before the first", _turns),
        "role": ("String", "who speaks", _text("role")),
        "content": ("String", "its text; JSON where it is no text, null where there is none", _text("content")),
        "tool_calls": ("String", "calls of tools, as JSON; null where there are none", _text("tool_calls")),
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


# -- calls of sessions --------------------------------------------------------------------------------


def _calls(document: Object) -> Sequence[Object]:
    """Return the calls on the path that a rollout is; none of a rollout that is no session's."""
    metadata = document.get("metadata") or {}
    calls = metadata[SESSION].get("calls", []) if session_of(metadata) else []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise CorruptStoreError(f"the calls in its metadata.{SESSION} are not a list of objects")
    return calls


CALLS = Documents(
    _calls,
    {
        "call": ("String", "its id", _text("id")),
        "number": ("Int64", "its place among the calls of the session, from 0 on", _number("number")),
        "start": ("Int64", "token of the rollout where its sampled tokens begin", _number("start")),
        "stop": ("Int64", "one past the last of them", _number("stop")),
        "policy_version": ("Int64", "training step whose weights sampled them", _number("policy_version")),
        "finish_reason": ("String", "why the model stopped", _text("finish_reason")),
        "retried": ("String", "why an attempt before was incomplete; null where there was none", _text("retried")),
        "json": ("String", "all that the rollout's metadata has of it, as JSON", _json),
    },
)

METADATA_ROWS = Documents(
    lambda document: [document.get("metadata")],  # type: ignore[list-item]
    {"json": ("String", "metadata as JSON", _json)},
)
"""One row for each rollout."""


def with_metadata(
    facts: DataFrame, wanted: Mapping[str, Path], scan: Callable[[str, DataFrame], LazyFrame], chosen: DataFrame
) -> DataFrame:
    """Return facts with values of metadata as more columns; null where a rollout has none, and for blocks of steps.

    Args:
        facts: the facts.
        wanted: paths of keys, by the name of their column.
        scan: returns the rows of a relation for trajectories with these facts.
        chosen: facts of the trajectories whose metadata is read; the others get nulls.

    Raises:
        ConfigurationError: a value is a list or an object; names the rollout.
    """
    pl = polars()
    rows = scan(METADATA, chosen).select("trajectory_id", "json").collect()
    documents = [orjson.loads(text) for text in rows["json"]]
    values = {name: [_value_at(document, path) for document in documents] for name, path in wanted.items()}
    for name, column in values.items():
        for number, value in zip(rows["trajectory_id"], column, strict=True):
            if isinstance(value, list):
                raise ConfigurationError(f"{name}: a list in trajectory {shown_id(number)}; name a text or a number")
            if isinstance(value, dict):
                raise ConfigurationError(
                    f"{name}: an object in trajectory {shown_id(number)}; name one of its values, as "
                    f"{name}.KEY: it has {listed(value)}"
                )
    columns = {name: _column(column) for name, column in values.items()}
    return facts.join(
        pl.DataFrame({"trajectory_id": rows["trajectory_id"], **columns}),
        "trajectory_id",
        how="left",
        maintain_order="left",
    )


def _value_at(value: Any, path: Path) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _column(values: Sequence[Any]) -> Series:
    """Return a column of numbers, bools or texts; all are texts if some are."""
    pl = polars()
    types = {type(value) for value in values if value is not None}
    if str in types and len(types) > 1:
        values = [v if v is None or isinstance(v, str) else orjson.dumps(v).decode() for v in values]
    elif len(types) > 1 or any(type(value) is int and value >= 1 << 63 for value in values):
        values = [None if value is None else float(value) for value in values]
    column: Series = pl.Series(values, strict=True)
    return column
