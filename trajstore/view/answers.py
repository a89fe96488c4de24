"""Tables of facts and late values as JSON values for the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.columns.facts import SCORE
from trajstore._core.store.notes import Notes
from trajstore._core.store.run_ids import shown_id
from trajstore.query import FACTS
from trajstore.query.engine import pl
from trajstore.query.texts import METADATA

Answer = dict[str, Any]

_SCALARS = {str: "text", int: "number", float: "number", bool: "bool"}
"""Types of values of metadata that can be columns."""

MOST_KEYS = 30
"""Maximum number of keys of metadata that are offered as columns."""

LONGEST = 300
"""Maximum number of characters of a fact in a table."""


def columns_of(table: pl.DataFrame) -> list[Answer]:
    """Return the facts of a table: ``{"name", "type", "note", "known"}``.

    ``known`` is true if any value is not null, and for ``kind`` if there are both.
    """
    return [
        {
            "name": name,
            "type": "id" if name == "trajectory_id" else _type(kind),
            "note": FACTS.get(name)
            or (f"{name.removeprefix(SCORE)} of the reward's metadata" if name.startswith(SCORE) else "late value"),
            "known": table["kind"].n_unique() > 1 if name == "kind" else table[name].null_count() < len(table),
        }
        for name, kind in table.schema.items()
    ]


def keys_of(texts: Iterable[str]) -> list[Answer]:
    """Return the most frequent keys of metadata whose values are texts, numbers or bools, in the form of columns.

    Args:
        texts: the metadata of rollouts, as JSON.
    """
    types: dict[str, list[type]] = {}
    for text in texts:
        for key, value in (orjson.loads(text) or {}).items():
            if value is not None and not {'"', "`", ","} & set(key):
                types.setdefault(key, []).append(type(value))
    scalar = [key for key, found in types.items() if set(found) <= _SCALARS.keys()]
    often = sorted(scalar, key=lambda key: -len(types[key]))[:MOST_KEYS]
    columns = []
    for key in sorted(often):
        name = f"{METADATA}.{key}" if key.isidentifier() else f'{METADATA}."{key}"'
        shown = {_SCALARS[kind] for kind in types[key]}
        kind = shown.pop() if len(shown) == 1 else "text"
        columns.append({"name": name, "type": kind, "note": "in the rollout's metadata", "known": True})
    return columns


def _type(kind: pl.DataType) -> str:
    if kind == pl.Boolean:
        return "bool"
    return "number" if kind.is_numeric() else "time" if kind.is_temporal() else "text"


def in_order(table: pl.DataFrame, ids: npt.NDArray[np.int64]) -> pl.DataFrame:
    """Return the facts of some trajectories, in the order of their ids.

    Args:
        table: facts of all trajectories.
        ids: ids of the wanted ones. If the table lacks one (evicted), all its facts except the id are null.
    """
    wanted = pl.DataFrame({"trajectory_id": ids})
    matching = table.filter(pl.col("trajectory_id").is_in(wanted["trajectory_id"].implode()))
    return wanted.join(matching, on="trajectory_id", how="left", maintain_order="left").select(table.columns)


def named_rows(table: pl.DataFrame) -> list[Answer]:
    """Return rows as dicts of JSON values, with ids as displayed."""
    return [{**plain_dict(row), "trajectory_id": shown_id(row["trajectory_id"])} for row in table.iter_rows(named=True)]


def plain_dict(row: Mapping[str, Any]) -> Answer:
    """Return a row with :func:`plain` applied to each value."""
    return {name: plain(value) for name, value in row.items()}


def plain(value: Any) -> Any:
    """Return a fact as a JSON value: times as milliseconds since 1970, NaN as text, long texts cut."""
    if isinstance(value, datetime):
        return round(value.replace(tzinfo=value.tzinfo or UTC).timestamp() * 1000)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[:LONGEST]} ... ({len(value) - LONGEST:,} more characters)"
    return value


# -- late values --------------------------------------------------------------------------------------

MOST_VALUES = 200
"""Maximum number of stored values that are sent; the newest."""


def late_values(trajectory_id: int, notes: Notes) -> Answer:
    """Return ``{"values", "earlier"}``: values, earliest first, and the number omitted before.

    A value is ``{"name", "value", "who", "time", "latest"}``. The time is in milliseconds since 1970; ``latest`` marks
    the value in force for its name.

    Args:
        trajectory_id: id of the trajectory in its store.
        notes: late values of the store.
    """
    history = notes.history(trajectory_id)
    newest = {note.name: at for at, note in enumerate(history)}
    values = [
        {
            "name": note.name,
            "value": note.value,
            "who": note.who,
            "time": note.time // 1000,
            "latest": newest[note.name] == at,
        }
        for at, note in enumerate(history)
    ]
    return {"values": values[-MOST_VALUES:], "earlier": max(0, len(values) - MOST_VALUES)}
