"""Converts rollouts of language-model agents to columns. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.facts import facts_of
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.limits import MAX_STEPS, plain_name, shown, version_number, whole_number
from trajstore._core.columns.schema import Extent, intern_schema
from trajstore._core.columns.values import NewColumn, as_tensor, document_column
from trajstore.errors import InvalidTrajectoryError, counted
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, AgentTrajectory, Reward

_WHOLE = frozenset((*TOKEN_COLUMNS, "response_mask"))
"""Columns of ids and masks."""

DOCUMENT_FIELDS = tuple(
    field.name for field in fields(AgentTrajectory) if field.name not in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS, "notes")
)
_TEXTS = ("task_id", "data_id", "rollout_id", "query", "tokenizer_fingerprint")


def flatten_agent(trajectory: AgentTrajectory) -> FlatTrajectory:
    """Return an agent trajectory as columns; see :func:`trajstore._core.columns.conversion.flatten`.

    Raises:
        InvalidTrajectoryError: fields do not fit together, or one has a value that cannot be stored.
    """
    values = vars(trajectory)
    columns: list[NewColumn] = []
    tensors: list[torch.Tensor] = []
    tokens = _agent_columns(values, TOKEN_COLUMNS, Axis.SAMPLES, columns, tensors)
    response_first = len(columns)
    response = _agent_columns(values, RESPONSE_COLUMNS, Axis.RESPONSE, columns, tensors)
    document = document_of(values)
    start = document.get("response_start")
    if tokens is not None:
        if start is not None and start > tokens:
            raise InvalidTrajectoryError(f"field response_start: {start}, must be in [0, L] with L = {tokens}")
        if response is not None and (0 < tokens < response if start is None else response != tokens - start):
            most = f"at most L = {tokens}" if start is None else f"L - response_start = {tokens - start}"
            raise InvalidTrajectoryError(
                f"field {columns[response_first][0]}: has {counted(response, 'entry')}, must have {most}"
            )
    size = document_column(document, columns, tensors)
    version = document.get("policy_version")
    return FlatTrajectory(
        intern_schema("agent", columns),
        Extent(tokens or 0, 1, response or 0, size),
        tuple(tensors),
        num_samples=1,
        max_episode_length=0,
        model_weights_id=weights_of(trajectory.metadata or {}),
        versions=None if version is None else (version, version),
        facts=facts_of(document),
    )


def document_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields that are not tensors, with whole numbers and the reward as plain values.

    Args:
        values: all fields of a rollout.

    Raises:
        InvalidTrajectoryError: a field does not match its annotation.
    """
    document = {name: values[name] for name in DOCUMENT_FIELDS if values[name] is not None}
    for name in _TEXTS:
        if type(values[name]) is not str and not isinstance(values[name], str | None):
            raise _wrong_type(name, values[name], "a string")
    metadata, messages, reward = values["metadata"], values["messages"], values["reward"]
    if not isinstance(metadata, dict | None):
        raise _wrong_type("metadata", metadata, "a dict")
    if not isinstance(messages, list | None):
        raise _wrong_type("messages", messages, "a list of dicts")
    for at, message in enumerate(messages or ()):
        if not isinstance(message, dict):
            raise _wrong_type(f"messages[{at}]", message, "a dict")
    terminated = values["is_terminated"]
    if terminated is not None and not isinstance(terminated, bool | np.bool_):
        raise _wrong_type("is_terminated", terminated, "True, False or None")
    if (start := values["response_start"]) is not None:
        document["response_start"] = whole_number("response_start", start, 0, MAX_STEPS)
    if (version := values["policy_version"]) is not None:
        document["policy_version"] = version_number("policy_version", version)
    if values["entropy"] is not None:
        document["entropy"] = _real("entropy", values["entropy"])
    if reward is None:
        return document
    if not isinstance(reward, Reward):
        hint = f"; write Reward(outcome={shown(reward)})" if isinstance(reward, int | float) else ""
        raise _wrong_type("reward", reward, f"a Reward or None{hint}")
    if not isinstance(reward.description, str | None):
        raise _wrong_type("reward.description", reward.description, "a string")
    if not isinstance(reward.metadata, dict | None):
        raise _wrong_type("reward.metadata", reward.metadata, "a dict")
    document["reward"] = {
        "outcome": _real("reward.outcome", reward.outcome),
        "success_rate": _real("reward.success_rate", reward.success_rate),
        "description": reward.description or "",
        "metadata": {} if reward.metadata is None else reward.metadata,
    }
    return document


def _real(field: str, value: Any) -> Any:
    """Return a number or None; bools as floats."""
    if value is None or (type(value) is float and isfinite(value)):
        return value
    if isinstance(value, bool | np.bool_):
        return float(value)
    if isinstance(value, int | np.integer) or (isinstance(value, float | np.floating) and isfinite(value)):
        return value  # an int of more than 64 bits is refused with the document
    raise _wrong_type(field, value, "a finite number or None")


def _wrong_type(field: str, value: Any, wanted: str) -> InvalidTrajectoryError:
    way = ", as its model_dump(exclude_none=True) returns" if hasattr(value, "model_dump") else ""
    return InvalidTrajectoryError(f"field {field}: {shown(value)} is a {type(value).__name__}, must be {wanted}{way}")


def _agent_columns(
    values: Mapping[str, Any], names: Sequence[str], axis: Axis, columns: list[NewColumn], tensors: list[torch.Tensor]
) -> int | None:
    """Append the known columns, and return their length; None if there are none."""
    length: int | None = None
    first = ""
    for name in names:
        value = values[name]
        if value is None:
            continue
        tensor = check_column(name, value, (1,))
        (size,) = tensor.shape
        if size > MAX_STEPS:
            raise InvalidTrajectoryError(f"field {name}: has {counted(size, 'entry')}, must have at most {MAX_STEPS}")
        if length is None:
            length, first = size, name
        elif length != size:
            raise InvalidTrajectoryError(f"field {name}: has {counted(size, 'entry')}, but {first} has {length}")
        columns.append((name, tensor.dtype, (), axis))
        tensors.append(tensor)
    return length


def check_column(name: str, value: Any, dimensions: Sequence[int]) -> torch.Tensor:
    """Return a column as a contiguous CPU tensor.

    Raises:
        InvalidTrajectoryError: it has other numbers of dimensions, or a dtype that does not fit its name.
    """
    tensor = as_tensor(name, value)
    shape, dtype = tensor.shape, tensor.dtype
    if len(shape) not in dimensions:
        wanted = "one dimension" if len(dimensions) == 1 else "one dimension (packed) or two (padded)"
        raise InvalidTrajectoryError(f"field {name}: shape {list(shape)}, must have {wanted}")
    if dtype.is_complex or (dtype.is_floating_point if name in _WHOLE else dtype is torch.bool):
        wanted = "whole numbers, or bool" if name in _WHOLE else "real numbers"
        raise InvalidTrajectoryError(f"field {name}: {str(dtype)[6:]}, must be {wanted}")
    return tensor


def weights_of(metadata: Mapping[str, Any]) -> str:
    """Return the ``model_weights_id`` in a rollout's metadata; empty if there is none."""
    return plain_name("metadata.model_weights_id", metadata.get("model_weights_id", ""))
