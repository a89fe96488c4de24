"""Facts of rollouts, as index columns and in log records. Pure; no I/O.

An index has only the fact columns for which some entry has a value. Unknown values are -1, or NaN for scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.facts import DOCUMENT_FACTS, SCORE
from trajstore._core.store.json_arrays import StringTable

FACTS: Mapping[str, str] = {
    "trajectory_id": "id, as get() and evict() take it",
    "rank": "rank of a run directory; 0 for a store that is read alone",
    "kind": "agent, or step for a block [T, B]",
    "samples": "valid steps of a block, T * B without the field valid; 1 of a rollout",
    "steps": "T of a block; tokens of a rollout, null without any",
    "batch": "B of a block; null of a rollout",
    "response": "length of the response's columns, such as old_log_probs; null of a block, or without any",
    "bytes": "bytes of the tensors and the document",
    "version_low": "lowest policy version",
    "version_high": "highest policy version",
    "committed": "when it became durable (UTC); in memory only, when it was added",
    "model_weights_id": "which weights acted",
    "max_episode_length": "as the block says",
    **DOCUMENT_FACTS,
    "readable": "false where the files are missing",
}
"""Names of the facts and their meanings. Unknown values are null.

Each number or bool in a reward's ``metadata`` is also a fact, ``reward_NAME``, and so is each late value.
"""

AGENT = "agent"
"""Name of the column with 1 for rollouts and 0 for step trajectories."""

TEXTS = ("task", "data_id", "rollout_id", "session")
"""Text facts, stored as numbers of a string table."""

_DTYPES: Mapping[str, npt.DTypeLike] = {
    AGENT: np.int8,
    **dict.fromkeys(TEXTS, np.int32),
    **dict.fromkeys(("outcome", "success_rate"), np.float64),
    **dict.fromkeys(("turns", "messages", "response_start"), np.int32),
    **dict.fromkeys(("session_path", "session_paths", "session_calls"), np.int32),
    "terminated": np.int8,
}

NOTE, NOTE_TEXT = "note:", "text:"
"""Prefixes of columns of late values: numbers and texts."""

NOTE_ROWS, NOTE_START = "rows:", "start:"
"""Prefixes of columns of row values: their table (shard or slot; -1 for none), and their first row in it."""

MOST_SCORES = 64
"""Maximum number of score names in an index; further ones are stored only in the rollouts."""


def is_fact(name: str) -> bool:
    """Return whether this is the name of a fact."""
    return name in _DTYPES or name.startswith(SCORE)


def is_note(name: str) -> bool:
    """Return whether this is a column of late values."""
    return name.startswith((NOTE, NOTE_TEXT, NOTE_ROWS, NOTE_START))


def is_optional(name: str) -> bool:
    """Return whether an index has this column only if some entry has a value there."""
    return is_fact(name) or is_note(name)


def is_text(name: str) -> bool:
    """Return whether an optional column holds string table numbers."""
    return name in TEXTS or name.startswith(NOTE_TEXT)


def fact_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of an optional column."""
    if name.startswith(NOTE_START):
        return np.dtype(np.int64)
    return np.dtype(np.int32 if is_text(name) or name.startswith(NOTE_ROWS) else _DTYPES.get(name, np.float64))


def unknown(name: str, count: int) -> npt.NDArray[Any]:
    """Return an optional column of ``count`` unknown values."""
    dtype = fact_dtype(name)
    return np.full(count, 0 if name == AGENT else np.nan if dtype.kind == "f" else -1, dtype)


def fact_columns(facts_of_shards: Sequence[tuple[Any, int]], table: StringTable) -> dict[str, npt.NDArray[Any]]:
    """Return the fact columns of the trajectories of several shards; names that are not facts are ignored.

    Args:
        facts_of_shards: per shard, the facts of its rollouts by name (None for step trajectories), and its number of
            trajectories.
        table: string table that receives the texts.

    Raises:
        TypeError, ValueError, OverflowError: a fact has values of the wrong kind, or the wrong number of them.
    """
    if all(facts is None for facts, _ in facts_of_shards):
        return {}
    columns = {
        AGENT: np.repeat(
            np.array([facts is not None for facts, _ in facts_of_shards], np.int8), [n for _, n in facts_of_shards]
        )
    }
    for name in dict.fromkeys(
        name for facts, _ in facts_of_shards for name in facts or () if is_fact(name) and name != AGENT
    ):
        values: list[Any] = []
        for facts, count in facts_of_shards:
            shard_values = (facts or {}).get(name)
            if shard_values is not None and (type(shard_values) is not list or len(shard_values) != count):
                raise ValueError(f"fact {name}: must be a list of {count} values")
            values += [None] * count if shard_values is None else shard_values
        columns[name] = _column(name, values, table)
    return columns


def _column(name: str, values: Sequence[Any], table: StringTable) -> npt.NDArray[Any]:
    dtype = fact_dtype(name)
    kinds = set(map(type, values)) - {type(None)}
    allowed = (
        {str} if name in TEXTS else {bool} if name == "terminated" else {int, float} if dtype.kind == "f" else {int}
    )
    if kinds - allowed:
        raise TypeError(f"fact {name}: a value is a {(kinds - allowed).pop().__name__}")
    if name in TEXTS:
        return np.array([-1 if text is None else table.add(text) for text in values], dtype)
    if dtype.kind == "f":
        return np.array(values, dtype)  # None becomes NaN
    return np.array([-1 if value is None else value for value in values], dtype)


def joined(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Return the concatenated columns of several indexes; facts missing from one are unknown there."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: np.concatenate(
            [part[name] if name in part else unknown(name, len(part["trajectory_id"])) for part in parts]
        )
        for name in names
    }
