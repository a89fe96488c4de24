"""Whole trajectories as rows of a table, and back. Pure; no I/O, nothing of Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.columns.fields import join_name, nest, walk
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Reward, Trajectory

DOCUMENT = "document"
"""Column with what is no tensor, as JSON: ``kind``, ``values`` by dotted name, ``dtypes`` that numpy lacks."""

ID = "trajectory_id"
SAMPLE = "sample"

_WIDER = {torch.complex32: torch.complex64}  # all others that numpy lacks are floats, and float32 has their values


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; of a dtype that numpy lacks (bfloat16, float8) in a wider one, without loss."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.to(_WIDER.get(tensor.dtype, torch.float32)).numpy()


def row_of(trajectory: AnyTrajectory, columns: Collection[str] | None = None) -> dict[str, Any]:
    """Return a trajectory as a row: an array per tensor by dotted name, ``[T, B, ...]`` or ``[L]``, and ``document``.

    Args:
        trajectory: any.
        columns: names of those wanted; None = all.
    """
    row: dict[str, Any] = {}
    values: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for path, leaf in walk({item.name: getattr(trajectory, item.name) for item in fields(trajectory)}):
        name = join_name(path)
        if not isinstance(leaf, torch.Tensor):
            values[name] = asdict(leaf) if isinstance(leaf, Reward) else leaf
        elif columns is None or name in columns:
            row[name] = array_of(leaf)
            dtype = str(leaf.dtype).removeprefix("torch.")
            if str(row[name].dtype) != dtype:
                dtypes[name] = dtype
    if columns is None or DOCUMENT in columns:
        kind = "step" if isinstance(trajectory, Trajectory) else "agent"
        row[DOCUMENT] = orjson.dumps({"kind": kind, "values": values, "dtypes": dtypes}).decode()
    return row


def trajectory_of(row: Mapping[str, Any]) -> AnyTrajectory:
    """Return the trajectory that a row has. ``trajectory_id`` is passed over, for a store gives its own.

    Without ``document`` it is an agent's if there are ``input_ids``, else one of steps.

    Raises:
        InvalidTrajectoryError: a column is no field of such a trajectory, or has no array; names it.
    """
    said = orjson.loads(row[DOCUMENT]) if row.get(DOCUMENT) is not None else {}
    kind = said.get("kind", "agent" if row.get("input_ids") is not None else "step")
    made = AgentTrajectory if kind == "agent" else Trajectory
    known = {item.name for item in fields(made)}
    values = dict(said.get("values", {}))
    for name, value in row.items():
        if name in (DOCUMENT, ID) or value is None:
            continue
        field = name.split(".", 1)[0]
        if name == SAMPLE:
            raise InvalidTrajectoryError(
                "column sample: the rows are single transitions, a store takes whole trajectories; read them with "
                "unit='trajectory'"
            )
        if field not in known:
            raise InvalidTrajectoryError(
                f"column {name}: {made.__name__} has no field {field!r}; drop_columns([{name!r}]) before writing"
            )
        array = np.asarray(value)
        if array.dtype == object:
            raise InvalidTrajectoryError(f"column {name}: its values are no array of numbers")
        dtype = said.get("dtypes", {}).get(name)
        tensor = torch.from_numpy(np.array(array, order="C"))  # a copy: what Ray gives must not be written to
        values[name] = tensor if dtype is None else tensor.to(getattr(torch, dtype))
    nested = nest(values)
    if isinstance(nested.get("reward"), dict):
        nested["reward"] = Reward(**nested["reward"])
    return made(**nested)
