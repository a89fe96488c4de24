"""Whole trajectories as table rows. Pure; no I/O, no Ray."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import orjson
import torch

from trajstore._core.columns.fields import join_name, walk
from trajstore.trajectory import AnyTrajectory, Reward, Trajectory

DOCUMENT = "document"
"""Column with all other values as JSON: ``kind``, ``values`` by dotted name, ``dtypes`` that numpy lacks."""

ID = "trajectory_id"
SAMPLE = "sample"

_WIDER = {torch.complex32: torch.complex64}  # all other dtypes that numpy lacks are floats that fit in float32


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; dtypes that numpy lacks (bfloat16, float8) are widened without loss."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.to(_WIDER.get(tensor.dtype, torch.float32)).numpy()


def row_of(trajectory: AnyTrajectory, columns: Collection[str] | None = None) -> dict[str, Any]:
    """Return a trajectory as a row: an array per tensor by dotted name, ``[T, B, ...]`` or ``[L]``, and ``document``.

    Args:
        trajectory: any.
        columns: names of the columns to include; None = all.
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
