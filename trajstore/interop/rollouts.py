"""Rollouts as JSON lines (``jsonl``) and Parquet files (``parquet``) that keep every field, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch

from trajstore._core.columns.conversion import with_notes
from trajstore._core.columns.facts import GIVEN, SCORE
from trajstore._core.columns.schema import dtypes
from trajstore._core.reading.late import COLUMNS
from trajstore._core.store.facts import FACTS
from trajstore._core.store.run_ids import ID_LIMIT
from trajstore.errors import ConfigurationError
from trajstore.interop.formats import (
    Format,
    LinesWriter,
    PartsWriter,
    Row,
    Selection,
    logger,
    read_lines,
    read_parquet,
    unreadable,
)
from trajstore.query.documents import text_of
from trajstore.query.engine import pl
from trajstore.query.relations import late_columns
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, AgentTrajectory, Reward

TENSORS = (*TOKEN_COLUMNS, *RESPONSE_COLUMNS)
_MASKS = (*TOKEN_COLUMNS, "response_mask")
_TEXTS = ("task_id", "data_id", "rollout_id", "query", "tokenizer_fingerprint")
_WHOLE = ("policy_version", "response_start")

_OF_THE_STORE = ("trajectory_id", "committed")
"""Fields that a store assigns anew."""

_IN_REST = ("reward", "metadata", "exact")
"""Fields that Parquet has as JSON in ``rest``."""

_NAMES = {*(field.name for field in fields(AgentTrajectory)), *_OF_THE_STORE, "exact"}

_LIMITS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}


def row_of(rollout: AgentTrajectory, late: Mapping[str, Any]) -> Row:
    """Return the fields of a rollout as JSON values.

    ``exact`` has what lists of numbers lose: dtypes, and the positions of NaN and infinities.

    Args:
        rollout: the rollout, with late values by row in ``notes``.
        late: its other late values, by name.
    """
    values = vars(rollout)
    tensors = {name: values[name] for name in TENSORS if values[name] is not None}
    by_row = {f"{COLUMNS}{name}": tensor for name, tensor in rollout.notes.items()}
    exact: Row = {"dtypes": {name: str(tensor.dtype)[6:] for name, tensor in (tensors | by_row).items()}}
    if limits := {name: places for name, tensor in (tensors | by_row).items() if (places := _limits_in(tensor))}:
        exact["not_finite"] = limits
    lists = {name: _list(name, tensors.get(name)) for name in TENSORS}
    notes = {**late, **{name: _list(name, tensor) for name, tensor in rollout.notes.items()}}
    reward = None if rollout.reward is None else vars(rollout.reward)
    return {**values, **lists, "reward": reward, "notes": notes, "exact": exact}


def _list(name: str, tensor: torch.Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.to(torch.int64 if name in _MASKS else torch.float64).tolist()


def _limits_in(tensor: torch.Tensor) -> dict[str, list[int]]:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return {}
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double()
    masks = {"NaN": numbers.isnan(), "Infinity": numbers == float("inf"), "-Infinity": numbers == -float("inf")}
    return {name: mask.nonzero().flatten().tolist() for name, mask in masks.items() if mask.any()}


@unreadable("is not a rollout", kind=ConfigurationError)
def rollout_of(row: Row) -> AgentTrajectory:
    """Return the rollout of a row, with its late values as a reader returns them; the inverse of :func:`row_of`.

    Raises:
        ConfigurationError: it is not a row of :func:`row_of`; names the field.
    """
    if unknown := row.keys() - _NAMES:
        raise ConfigurationError(f"{min(unknown)!r} is not a field of a rollout; put it in metadata")
    exact = row.get("exact") or {}
    kinds, limits = exact.get("dtypes", {}), exact.get("not_finite", {})

    def tensor(name: str, values: Any) -> torch.Tensor:
        default = "int64" if name in _MASKS else "float32"
        return _tensor(values, dtypes()[kinds.get(name, default)], limits.get(name, {}))

    given = {name: value for name, value in row.items() if name in _NAMES and value is not None}
    notes = given.pop("notes", {})
    for name in (*_OF_THE_STORE, "exact"):
        given.pop(name, None)
    given |= {name: tensor(name, given[name]) for name in TENSORS if name in given}
    rows = {name: tensor(f"{COLUMNS}{name}", v) for name, v in notes.items() if isinstance(v, list)}
    reward = given.pop("reward", None)
    rollout = AgentTrajectory(**given, reward=None if reward is None else Reward(**reward))
    if GIVEN not in rollout.metadata:
        rollout = with_notes(rollout, {name: value for name, value in notes.items() if name not in rows})
    rollout.notes = rows
    return rollout


def _tensor(values: Any, dtype: torch.dtype, limits: Mapping[str, Sequence[int]]) -> torch.Tensor:
    def filled(item: Any) -> Any:
        return [filled(part) for part in item] if isinstance(item, list) else 0 if item is None else item

    real = dtype.is_floating_point or dtype.is_complex
    tensor = torch.tensor(filled(values), dtype=torch.float64 if real or not values else None)
    if (
        not real
        and values
        and (tensor.is_floating_point() or not torch.equal(tensor.to(dtype).to(tensor.dtype), tensor))
    ):
        raise ValueError(f"not a list of {str(dtype)[6:]}")
    flat = tensor.view(-1)
    unknown = [at for at, value in enumerate(_flat(values)) if value is None]
    if set(unknown) - {at for places in limits.values() for at in places}:
        raise ValueError("null in place of a number")
    for name, places in limits.items():
        flat[torch.tensor(places, dtype=torch.int64)] = _LIMITS[name]
    return torch.view_as_complex(tensor).to(dtype) if dtype.is_complex else tensor.to(dtype)


def _flat(values: Any) -> list[Any]:
    return [part for item in values for part in (item if isinstance(item, list) else [item])]


# -- Parquet ------------------------------------------------------------------------------------------


def _parquet_schema(late: Mapping[str, pl.DataType], is_run: bool) -> dict[str, Any]:
    """Return the columns of Parquet files.

    Args:
        late: types of the late values, by name.
        is_run: ids are texts such as ``"2/1"``.
    """
    return {
        "trajectory_id": pl.String if is_run else pl.Int64,
        **dict.fromkeys(_TEXTS, pl.String),
        "committed": pl.Datetime("us", "UTC"),
        **dict.fromkeys(_WHOLE, pl.Int64),
        **dict.fromkeys(("outcome", "success_rate", "entropy"), pl.Float64),
        "is_terminated": pl.Boolean,
        "messages": pl.List(message_type()),
        **{name: pl.List(pl.Int64 if name in _MASKS else pl.Float64) for name in TENSORS},
        **{f"{COLUMNS}{name}": kind for name, kind in late.items()},
        "rest": pl.String,
    }


def message_type(*, whole: bool = True) -> pl.DataType:
    """Return the type of a message in Parquet files: texts and tool calls that chat templates see, and all as JSON.

    Args:
        whole: with JSON.
    """
    call = pl.Struct(
        {"id": pl.String, "type": pl.String, "function": pl.Struct({"name": pl.String, "arguments": pl.String})}
    )
    texts = dict.fromkeys(_MESSAGE_TEXTS, pl.String)
    rest = {"json": pl.String} if whole else {}
    return pl.Struct({**texts, "tool_calls": pl.List(call), **rest})


_MESSAGE_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")
"""Fields of messages that are texts; anything else in them is JSON."""


def _to_parquet(row: Row) -> Row:
    """Return a row with the columns of :func:`_parquet_schema`."""
    reward = row["reward"] or {}
    return {
        **row,
        "outcome": reward.get("outcome"),
        "success_rate": reward.get("success_rate"),
        "messages": [message_columns(message) for message in row["messages"]],
        **{f"{COLUMNS}{name}": value for name, value in row["notes"].items()},
        "rest": text_of({name: row[name] for name in _IN_REST}),
    }


def message_columns(message: Mapping[str, Any]) -> Row:
    """Return a message as the columns of :func:`message_type`."""
    calls = message.get("tool_calls")
    structured = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else None
    texts = {name: text_of(message.get(name)) for name in _MESSAGE_TEXTS}
    return {**texts, "tool_calls": structured and [_call(call) for call in structured], "json": text_of(dict(message))}


def _call(call: Mapping[str, Any]) -> Row:
    """Return a tool call as columns; its arguments are JSON, as models write them."""
    function = call.get("function", call)
    function = function if isinstance(function, dict) else {**call, "name": function}
    columns = {name: text_of(function.get(name)) for name in ("name", "arguments")}
    return {**{name: text_of(call.get(name)) for name in ("id", "type")}, "function": columns}


def _from_parquet(row: Row) -> Row:
    """Return a row of :func:`_to_parquet` as that of :func:`row_of`."""
    late = {name.removeprefix(COLUMNS): row.pop(name) for name in [*row] if name.startswith(COLUMNS)}
    rest = orjson.loads(row.pop("rest", None) or "{}")
    for name in ("outcome", "success_rate"):  # also in the reward
        row.pop(name, None)
    messages = [orjson.loads(message["json"]) for message in row.pop("messages", None) or []]
    notes = {name: value for name, value in late.items() if value is not None}
    return {**row, **rest, "messages": messages, "notes": notes}


# -- formats ------------------------------------------------------------------------------------------


def _late_types(selection: Selection) -> dict[str, pl.DataType]:
    """Return the names of the late values with the types of their Parquet columns."""
    facts = selection.query.limit(0).table().schema
    types = {name: kind for name, kind in facts.items() if name not in FACTS and not name.startswith(SCORE)}
    by_row = late_columns(selection.reader._live.locked, "tokens")
    types |= {name: pl.List(pl.List(pl.Float64) if several else pl.Float64) for name, several in by_row.items()}
    if both := sorted(facts.keys() & by_row.keys()):
        logger.warning(
            "convert: values %s are by row in one rank and one for each trajectory in another, so they are left out; "
            "convert each rank by itself to include them",
            ", ".join(both),
        )
    return {name: kind for name, kind in types.items() if name not in both}


def _with_late(late: Mapping[str, pl.DataType], rollout: AgentTrajectory, facts: Mapping[str, Any]) -> Row:
    """Return the row of a rollout with the late values of these names and types."""
    given = rollout.metadata.get(GIVEN, {})
    texts = pl.String
    shown = {name: str(given[name]) if kind == texts else given[name] for name, kind in late.items() if name in given}
    by_row = {name: rows for name, rows in rollout.notes.items() if name in late}
    return {**facts, **row_of(replace(rollout, notes=by_row), shown)}


def _write_lines(path: Path, selection: Selection) -> LinesWriter:
    return LinesWriter(path, partial(_with_late, _late_types(selection)))


def _write_parquet(path: Path, selection: Selection) -> PartsWriter:
    late = _late_types(selection)
    schema = _parquet_schema(late, bool((selection.reader.trajectory_ids >= ID_LIMIT).any()))
    return PartsWriter(path, lambda rollout, facts: _to_parquet(_with_late(late, rollout, facts)), schema)


_read_lines = partial(read_lines, trajectory_of=rollout_of)
_read_parquet = partial(read_parquet, trajectory_of=lambda row: rollout_of(_from_parquet(row)))

FORMATS = (
    Format("jsonl", "rollouts", (), _OF_THE_STORE, _write_lines, _read_lines),
    Format("parquet", "rollouts", (), _OF_THE_STORE, _write_parquet, _read_parquet),
)
