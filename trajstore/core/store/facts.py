"""Facts of rollouts as columns of an index and as a record of the log tells them. Pure; no I/O.

An index has those columns of which an entry knows something; what is not known is -1, in a column of scores NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.facts import DOCUMENT_FACTS, SCORE
from trajstore.core.store.packing import StringTable

FACTS: Mapping[str, str] = {
    "trajectory_id": "id, as get() and evict() take it",
    "rank": "rank of a run directory; 0 for a store that is read alone",
    "kind": "agent, or step for a block [T, B]",
    "samples": "T * B of a block; 1 of a rollout",
    "steps": "T of a block; tokens of a rollout",
    "batch": "B of a block; 1 of a rollout",
    "response": "length of the response's columns, such as old_log_probs; 0 of a block, or without any",
    "bytes": "bytes of the tensors and the document",
    "version_low": "lowest policy version",
    "version_high": "highest policy version",
    "committed": "when it became durable (UTC); in memory only, when it was added",
    "model_weights_id": "which weights acted",
    "max_episode_length": "as the block says; 0 for none",
    **DOCUMENT_FACTS,
    "readable": "false where the files are missing",
}
"""Names of the facts, and what each is. From ``version_low`` on they are null where they are not known.

Each number or bool of a reward's ``metadata`` is a fact besides: ``reward_NAME``; and so is each value that came late.
"""

AGENT = "agent"
"""Name of the column that is 1 of rollouts and 0 of step trajectories."""

TEXTS = ("task", "data_id", "rollout_id")
"""Facts that are texts: numbers of a string table."""

_DTYPES: Mapping[str, npt.DTypeLike] = {
    AGENT: np.int8,
    **dict.fromkeys(TEXTS, np.int32),
    **dict.fromkeys(("outcome", "success_rate"), np.float64),
    **dict.fromkeys(("turns", "messages", "response_start"), np.int32),
    "terminated": np.int8,
}

NOTE, NOTE_TEXT = "note:", "text:"
"""Columns of values that came late, numbers and texts, are called so, with the name behind it."""

NOTE_ROWS, NOTE_START = "rows:", "start:"
"""So are those of values by row: table (shard or slot) of the rows, -1 for none, and the first row in it."""

MOST_SCORES = 64
"""Names of scores that an index has; facts of further names stay in the rollouts alone."""

Facts = Mapping[str, Any]
"""What is known of a rollout, by name."""


def is_fact(name: str) -> bool:
    """Return whether a fact has this name."""
    return name in _DTYPES or name.startswith(SCORE)


def is_note(name: str) -> bool:
    """Return whether a column is of values that came late."""
    return name.startswith((NOTE, NOTE_TEXT, NOTE_ROWS, NOTE_START))


def is_optional(name: str) -> bool:
    """Return whether an index has this column only if one of its entries has something there."""
    return is_fact(name) or is_note(name)


def is_text(name: str) -> bool:
    """Return whether an optional column numbers texts."""
    return name in TEXTS or name.startswith(NOTE_TEXT)


def fact_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of an optional column."""
    if name.startswith(NOTE_START):
        return np.dtype(np.int64)
    return np.dtype(np.int32 if is_text(name) or name.startswith(NOTE_ROWS) else _DTYPES.get(name, np.float64))


def unknown(name: str, count: int) -> npt.NDArray[Any]:
    """Return the optional column of so many entries of which nothing is known."""
    dtype = fact_dtype(name)
    return np.full(count, 0 if name == AGENT else np.nan if dtype.kind == "f" else -1, dtype)


def facts_to_json(facts: Sequence[Facts]) -> dict[str, list[Any]]:
    """Return the facts of the rollouts of a shard as JSON values, by name; None where one lacks it."""
    return {name: [one.get(name) for one in facts] for name in dict.fromkeys(chain.from_iterable(facts))}


def fact_columns(told: Sequence[tuple[Any, int]], table: StringTable) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of facts of the trajectories of several shards; names that no fact has are passed over.

    Args:
        told: of each shard what :func:`facts_to_json` returned, None of step trajectories; and how many there are.
        table: takes the texts.

    Raises:
        TypeError, ValueError, OverflowError: a fact has values of the wrong kind, or not as many.
    """
    if all(facts is None for facts, _ in told):
        return {}
    columns = {AGENT: np.repeat(np.array([facts is not None for facts, _ in told], np.int8), [n for _, n in told])}
    for name in dict.fromkeys(name for facts, _ in told for name in facts or () if is_fact(name) and name != AGENT):
        values: list[Any] = []
        for facts, count in told:
            some = (facts or {}).get(name)
            if some is not None and (type(some) is not list or len(some) != count):
                raise ValueError(f"fact {name} of {count} trajectories: not so many values")
            values += [None] * count if some is None else some
        columns[name] = _column(name, values, table)
    return columns


def _column(name: str, values: Sequence[Any], table: StringTable) -> npt.NDArray[Any]:
    dtype = fact_dtype(name)
    kinds = set(map(type, values)) - {type(None)}
    wanted = (
        {str} if name in TEXTS else {bool} if name == "terminated" else {int, float} if dtype.kind == "f" else {int}
    )
    if kinds - wanted:
        raise TypeError(f"fact {name}: a value is a {(kinds - wanted).pop().__name__}")
    if name in TEXTS:
        return np.array([-1 if text is None else table.add(text) for text in values], dtype)
    if dtype.kind == "f":
        return np.array(values, dtype)  # None becomes NaN
    return np.array([-1 if value is None else value for value in values], dtype)


def joined(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of all entries of several indexes; facts that one lacks are unknown there."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: np.concatenate(
            [part[name] if name in part else unknown(name, len(part["trajectory_id"])) for part in parts]
        )
        for name in names
    }
