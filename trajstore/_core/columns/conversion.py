"""Converts trajectories of any kind to columns and back. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trajstore._core.columns.agents import agent_trajectory, flatten_agent
from trajstore._core.columns.document import decode_document
from trajstore._core.columns.fields import Axis, nest
from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.schema import DOCUMENT, Extent, Schema
from trajstore._core.columns.steps import flatten_step
from trajstore._core.columns.values import leaves_of
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Trajectory


def flatten(trajectory: AnyTrajectory) -> FlatTrajectory:
    """Check a trajectory and convert it to columns, which share the trajectory's tensors where possible.

    Accepted trajectories can be written, and read back equal; see ``limits`` and ``document`` beside this module.

    Raises:
        InvalidTrajectoryError: fields do not fit together, or one has a value that cannot be stored; the message
            names the field, and its shape or value.
    """
    try:
        notes = getattr(trajectory, "notes", None)
        if type(notes) is not dict or notes:
            _refuse_notes(notes)
        if isinstance(trajectory, AgentTrajectory):
            return flatten_agent(trajectory)
        return flatten_step(trajectory)
    except InvalidTrajectoryError as error:
        if str(error).isprintable():
            raise
        text = str(error).encode("unicode_escape").decode()  # names that are not checked yet
        raise InvalidTrajectoryError(text) from error


def _refuse_notes(notes: Any) -> None:
    """Refuse late values by row: they are set on stored trajectories only."""
    if not isinstance(notes, Mapping | None):
        raise InvalidTrajectoryError(f"field notes: must be an empty dict, is a {type(notes).__name__}")
    for name, value in (notes or {}).items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InvalidTrajectoryError(
                f"field notes: {name!r}: is a {type(value).__name__}, must be a name with a tensor of rows; set "
                "numbers and texts with trajstore.annotate after adding"
            )
    if notes:
        raise InvalidTrajectoryError(
            f"field notes: {', '.join(map(str, notes))}: late values by row need a store: add the trajectory to a "
            "buffer with auto_save=True, or without them (notes={})"
        )


def trajectory_of(schema: Schema, extent: Extent, tensors: Mapping[str, torch.Tensor], **known: Any) -> AnyTrajectory:
    """Return the trajectory of stored columns; inverse of :func:`flatten`.

    Args:
        schema: the columns.
        extent: rows per axis.
        tensors: by name of the column, ``[rows, *row_shape]`` or already ``[T, B, *row_shape]``.
        known: fields kept in the index (``max_episode_length``, ``model_weights_id``), which agent trajectories lack.

    Raises:
        CorruptStoreError: the JSON document is damaged.
    """
    document: dict[str, Any] = {}
    values: dict[str, torch.Tensor] = {}
    for column in schema.columns:
        tensor = tensors[column.name]
        if column.axis is Axis.DOCUMENT:
            document = parse_document(tensor)
        elif schema.kind == "step":
            rows = extent.rows(column.axis)
            values[column.name] = tensor.reshape(rows // max(extent.batch, 1), extent.batch, *column.row_shape)
        else:
            values[column.name] = tensor
    try:
        if schema.kind == "step":
            merged: dict[str, Any] = {**values, **leaves_of(document)}
            return Trajectory(**known, **nest(merged))
        return agent_trajectory(values, document)
    except TypeError as error:  # names that are not fields, or values that are not objects
        raise CorruptStoreError(f"column {DOCUMENT}: does not describe a trajectory: {error}") from error


def parse_document(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the JSON document of a trajectory.

    Raises:
        CorruptStoreError: it is malformed.
    """
    try:
        return decode_document(tensor.numpy().tobytes())
    except CorruptStoreError as error:
        raise CorruptStoreError(f"column {DOCUMENT}: {error}") from error
