"""Calls of agent sessions as columns: a row for each call on the path that a rollout is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from trajstore._core.base.types import IntArray
from trajstore._core.columns.facts import SESSION, session_of
from trajstore.errors import CorruptStoreError
from trajstore.query.messages import Rollouts, series_of, text_of
from trajstore.query.readable import Locked, of_documents

if TYPE_CHECKING:
    from polars import Series

COLUMNS: Mapping[str, tuple[str, str]] = {
    "call": ("String", "its id"),
    "number": ("Int64", "its place among the calls of the session, from 0 on"),
    "start": ("Int64", "token of the rollout where its sampled tokens begin"),
    "stop": ("Int64", "one past the last of them"),
    "policy_version": ("Int64", "training step whose weights sampled them"),
    "finish_reason": ("String", "why the model stopped"),
    "retried": ("String", "why an attempt before was incomplete; null where there was none"),
    "json": ("String", "all that the rollout's metadata has of it, as JSON"),
}
"""Name, type in Polars and meaning of each column."""


def read(
    locked: Locked, ids: IntArray, names: Sequence[str], _: Mapping[str, bool]
) -> tuple[IntArray, dict[str, Series]]:
    """Return the number of calls of each rollout, ``[n]``, and columns of all calls; 0 of one that is no session's.

    Raises:
        TrajectoryUnavailableError: a rollout was evicted meanwhile.
        CorruptStoreError, OSError: a rollout is unreadable.
    """
    return series_of(of_documents(locked, ids, _calls), names, COLUMNS, _VALUES)


def _calls(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    metadata = document.get("metadata") or {}
    calls = metadata[SESSION].get("calls", []) if session_of(metadata) else []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise CorruptStoreError(f"the calls in its metadata.{SESSION} are not a list of objects")
    return calls


def _values(rollouts: Rollouts, name: str, known: Callable[[Any], Any]) -> Iterable[Any]:
    return [known(call.get(name)) for calls in rollouts for call in calls]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


_VALUES: Mapping[str, Callable[[Rollouts], Iterable[Any]]] = {
    "call": lambda rollouts: _values(rollouts, "id", text_of),
    **{name: partial(_values, name=name, known=_number) for name in ("number", "start", "stop", "policy_version")},
    **{name: partial(_values, name=name, known=text_of) for name in ("finish_reason", "retried")},
    "json": lambda rollouts: [orjson.dumps(call).decode() for calls in rollouts for call in calls],
}
