"""Converts step trajectories ``[T, B, ...]`` to columns. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.fields import DICT_FIELDS, TENSOR_FIELDS, VALID, Axis, axis_of, join_name, walk
from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.limits import (
    MAX_SAMPLES,
    MAX_STEPS,
    RANGES,
    plain_name,
    shown,
    version_number,
    whole_number,
)
from trajstore._core.columns.schema import Extent, dtypes, intern_schema
from trajstore._core.columns.values import NewColumn, as_tensor, document_column, document_of
from trajstore.errors import InvalidTrajectoryError, counted
from trajstore.trajectory import get_model_weights_id


class NothingToStoreError(InvalidTrajectoryError):
    """A trajectory has no fields, or no samples."""


def _or_0(value: Any) -> Any:
    return 0 if value is None else value


def _leading_shape(trajectory: Any) -> tuple[int, int]:
    if (name := _extent_of(trajectory)) is not None:
        value = getattr(trajectory, name)
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise InvalidTrajectoryError(f"field {name}: must be a tensor, is a {type(value).__name__}")
        if isinstance(value, torch.Tensor) and value.is_nested:
            as_tensor(name, value)  # raises: it has no shape
        shape = tuple(value.shape)
        if len(shape) < 2:
            raise InvalidTrajectoryError(f"field {name}: shape {list(shape)}, must be [T, B, ...]")
        return shape[0], shape[1]
    if not hasattr(trajectory, "max_episode_length"):
        raise InvalidTrajectoryError(
            f"{shown(trajectory)} is a {type(trajectory).__name__}, must be a Trajectory or an AgentTrajectory"
        )
    if all(getattr(trajectory, name, None) is None for name in TENSOR_FIELDS) and not any(
        getattr(trajectory, name, None) for name in DICT_FIELDS
    ):
        raise NothingToStoreError("trajectory has no fields: there is nothing in it to store")
    raise InvalidTrajectoryError("a trajectory needs prev_logprobs or rewards: one of them gives T and B")


def _extent_of(trajectory: Any) -> str | None:
    """Return the name of the field that gives T and B; None if it is absent."""
    return next((name for name in ("prev_logprobs", "rewards") if getattr(trajectory, name, None) is not None), None)


def _check_extent(steps: int, batch: int) -> None:
    """Refuse more steps, environments or samples than the index can hold."""
    if steps * batch == 0:
        raise NothingToStoreError(f"trajectory has T = {steps}, B = {batch}: there is nothing in it to store")
    for name, value, most in (("T", steps, MAX_STEPS), ("B", batch, MAX_STEPS), ("T·B", steps * batch, MAX_SAMPLES)):
        if value > most:
            raise InvalidTrajectoryError(f"trajectory has {name} = {value}, must be in [1, {most}]; split it")


def flatten_step(trajectory: Any) -> FlatTrajectory:
    """Return a step trajectory as columns; see :func:`trajstore._core.columns.conversion.flatten`.

    Raises:
        InvalidTrajectoryError: fields do not fit together, or one has a value that cannot be stored.
    """
    steps, batch = _leading_shape(trajectory)
    if not 0 < steps * batch <= MAX_STEPS:  # one comparison for the usual case
        _check_extent(steps, batch)
    extra, samples = 0, steps * batch
    extra_field = ""
    columns: list[NewColumn] = []
    tensors: list[torch.Tensor] = []
    for name in TENSOR_FIELDS:
        value = getattr(trajectory, name, None)
        if value is None:
            continue
        tensor = as_tensor(name, value)
        shape = tuple(tensor.shape)
        if tensor.dtype.is_complex and name != "actions":
            raise InvalidTrajectoryError(f"field {name}: {str(tensor.dtype)[6:]}, must be real numbers")
        if len(shape) < 2 or shape[1] != batch:
            raise InvalidTrajectoryError(
                f"field {name}: shape {list(shape)} is not [T, B, ...] with B = {batch}, as in {_extent_of(trajectory)}"
            )
        if name == VALID:
            samples = _valid_samples(tensor, steps, batch)
        axis, extra, extra_field = _axis_among(name, shape[0], steps, extra, extra_field)
        columns.append((name, tensor.dtype, shape[2:], axis))
        tensors.append(tensor)
    leaves: dict[str, Any] = {}
    for field in DICT_FIELDS:
        given = getattr(trajectory, field, None)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise InvalidTrajectoryError(f"field {field}: must be a dict of tensors, is a {type(given).__name__}")
        for path, value in walk(given, (field,)):
            name = join_name(path)
            if not isinstance(value, torch.Tensor | np.ndarray):
                leaves[plain_name(shown(name), name)] = value
                continue
            tensor = as_tensor(name, value)
            shape = tuple(tensor.shape)
            if len(shape) < 2:
                if tensor.dtype not in dtypes().values():
                    raise InvalidTrajectoryError(f"field {name}: dtype {tensor.dtype} cannot be stored")
                leaves[plain_name(shown(name), name)] = tensor  # without a row for each step: returned, never sampled
                continue
            if shape[1] != batch:
                raise InvalidTrajectoryError(
                    f"field {name}: shape {list(shape)}, must begin with [T, B] = [{steps}, {batch}]"
                )
            axis, extra, extra_field = _axis_among(name, shape[0], steps, extra, extra_field)
            columns.append((name, tensor.dtype, shape[2:], axis))
            tensors.append(tensor)
    size = document_column(document_of(leaves), columns, tensors)
    versions = next((tensor for (name, *_), tensor in zip(columns, tensors, strict=True) if name == "versions"), None)
    known = version_range(acting_rows(versions, steps))  # first: versions that are not numbers have no bytes for an id
    weights = trajectory.model_weights_id
    if weights is None or (isinstance(weights, str) and not weights):
        weights = get_model_weights_id(versions if versions is not None else torch.zeros(1, dtype=torch.float32))
    return FlatTrajectory(
        intern_schema("step", columns),
        Extent(steps, batch, extra, size),
        tuple(tensors),
        num_samples=samples,
        max_episode_length=whole_number(
            "max_episode_length", _or_0(trajectory.max_episode_length), *RANGES["max_episode_length"]
        ),
        model_weights_id=plain_name("model_weights_id", weights),
        versions=known,
    )


def _valid_samples(valid: torch.Tensor, steps: int, batch: int) -> int:
    """Return the number of valid steps.

    Raises:
        InvalidTrajectoryError: the field is not bool, or not ``[T, B]``.
    """
    if valid.dtype != torch.bool or tuple(valid.shape) != (steps, batch):
        raise InvalidTrajectoryError(
            f"field {VALID}: {valid.dtype} {list(valid.shape)}, must be torch.bool [T, B] = [{steps}, {batch}]"
        )
    return int(np.count_nonzero(valid.numpy()))


def _axis_among(name: str, rows: int, steps: int, extra: int, extra_field: str) -> tuple[Axis, int, str]:
    """Return a column's axis, and the trajectory's E with the column that defined it, as far as known."""
    if rows == steps:
        return Axis.SAMPLES, extra, extra_field
    axis, more = axis_of(name, rows, steps)
    if extra and more != extra:
        raise InvalidTrajectoryError(
            f"field {name}: has {counted(rows, 'row')} = T + {more}, but {extra_field} has {steps + extra} "
            f"= T + {extra}"
        )
    return axis, more, name


_NUMPY_FLOATS = frozenset({torch.float16, torch.float32, torch.float64})


def acting_rows(versions: torch.Tensor | None, steps: int) -> torch.Tensor | None:
    """Return the rows of ``versions``, ``[T or T + E, B, ...]``, that belong to the T steps."""
    if versions is None or versions.shape[0] == steps or versions.numel() == 0:
        return versions
    epochs = versions.shape[0] - steps
    return versions.reshape(epochs, steps // epochs + 1, -1)[:, :-1]


def versions_of(flat: FlatTrajectory) -> tuple[int, int] | None:
    """Return the lowest and highest policy version in that column; None if unknown."""
    for spec, tensor in zip(flat.schema.columns, flat.tensors, strict=True):
        if spec.name == "versions" and flat.extent.steps * flat.extent.batch:
            rows = tensor.reshape(-1, flat.extent.batch, *spec.row_shape)
            try:
                return version_range(acting_rows(rows, flat.extent.steps))
            except InvalidTrajectoryError:  # RLinf stores unchecked values
                return None
    return None


def version_range(versions: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the lowest and highest policy version of a trajectory; None if unknown.

    Args:
        versions: real numbers, on the CPU.

    Raises:
        InvalidTrajectoryError: a version is not a finite number, or exceeds 64 bits.
    """
    if versions is None or versions.numel() == 0:
        return None
    if versions.is_complex():  # numpy lacks the smallest complex dtype
        raise InvalidTrajectoryError("field versions: not a finite number")
    if versions.is_floating_point() and versions.dtype not in _NUMPY_FLOATS:
        versions = versions.float()
    array = versions.numpy()  # torch's operators would release the GIL and wait for it again
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise InvalidTrajectoryError("field versions: not a finite number")
    return version_number("versions", int(low)), version_number("versions", int(high))
