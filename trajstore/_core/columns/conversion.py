"""Converts trajectories of any kind to columns and back. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from trajstore._core.columns.agents import flatten_agent
from trajstore._core.columns.document import decode_document
from trajstore._core.columns.facts import GIVEN, OVER_FACTS, RECORDED, SCORE
from trajstore._core.columns.fields import Axis, nest
from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.schema import DOCUMENT, Extent, Schema
from trajstore._core.columns.steps import flatten_step
from trajstore._core.columns.values import leaves_of
from trajstore.errors import ConfigurationError, CorruptStoreError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Reward, Trajectory


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


def trajectory_of(schema: Schema, extent: Extent, tensors: Sequence[torch.Tensor], **known: Any) -> AnyTrajectory:
    """Return the trajectory of stored columns; inverse of :func:`flatten`.

    Args:
        schema: the columns.
        extent: rows per axis.
        tensors: of the columns, ``[rows, *row_shape]`` or already ``[T, B, *row_shape]``.
        known: fields kept in the index (``max_episode_length``, ``model_weights_id``), which agent trajectories lack.

    Raises:
        CorruptStoreError: the JSON document is damaged.
    """
    document: dict[str, Any] = {}
    values: dict[str, torch.Tensor] = {}
    for column, tensor in zip(schema.columns, tensors, strict=True):
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
        reward = document.pop("reward", None)
        given = {**values, **document}
        rollout = AgentTrajectory(**given, reward=None if reward is None else Reward(**reward))
        if not isinstance(rollout.metadata, dict) or not isinstance(rollout.messages, list):
            raise TypeError("metadata must be an object, messages a list")
        return rollout
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


def with_notes(rollout: AgentTrajectory, given: Mapping[str, float | str]) -> AgentTrajectory:
    """Apply late values to a rollout's reward, and list all of them in its metadata.

    Args:
        rollout: the rollout as recorded.
        given: latest values by name; ``outcome``, ``success_rate`` and ``reward_NAME`` replace those of the reward.
    """
    if not given:
        return rollout
    reward = rollout.reward or Reward()
    recorded: dict[str, Any] = {}
    over: dict[str, Any] = {}
    scores = dict(reward.metadata)
    for name, value in given.items():
        if name in OVER_FACTS:
            recorded[name], over[name] = getattr(reward, name), value
        elif name.startswith(SCORE):
            recorded[name] = scores.get(name.removeprefix(SCORE))
            scores[name.removeprefix(SCORE)] = value
    late_metadata = {GIVEN: dict(given)} | ({RECORDED: recorded} if recorded else {})
    corrected = replace(reward, **over, metadata=scores) if recorded else rollout.reward
    return replace(rollout, reward=corrected, metadata={**rollout.metadata, **late_metadata})


def recorded_of(rollout: AgentTrajectory) -> tuple[AgentTrajectory, dict[str, float | str]]:
    """Return a rollout as recorded, and its late values; inverse of :func:`with_notes`.

    Raises:
        ConfigurationError: its metadata has something else under the names of late values.
    """
    metadata = dict(rollout.metadata or {})
    given, recorded = metadata.pop(GIVEN, {}), metadata.pop(RECORDED, {})
    if not given:
        return rollout, {}
    if not all(isinstance(part, dict) and all(isinstance(name, str) for name in part) for part in (given, recorded)):
        raise ConfigurationError(f"metadata: {GIVEN} and {RECORDED} must be dicts of late values by name")
    reward = rollout.reward
    if reward is not None and recorded:
        over = {name: value for name, value in recorded.items() if name in OVER_FACTS}
        scores = dict(reward.metadata)
        for name, value in recorded.items():
            if name.startswith(SCORE):
                scores[name.removeprefix(SCORE)] = value
        scores = {name: value for name, value in scores.items() if value is not None or SCORE + name not in recorded}
        reward = replace(reward, **over, metadata=scores)
        reward = None if reward == Reward() else reward
    return replace(rollout, reward=reward, metadata=metadata), dict(given)
