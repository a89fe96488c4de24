"""Values of a rollout that are neither fields nor JSON: expert routes, images, any column per token, any bytes. Pure.

They are part of ``metadata``, so they are stored, copied and deleted with the rollout, in every format.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import torch

from trajstore._core.columns.limits import MAX_STEPS, shown, whole_number
from trajstore._core.columns.schema import dtypes
from trajstore._core.columns.values import as_tensor, document_of, leaves_of
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError

ATTACHED, FILLED = "trajstore.attached", "trajstore.filled"
"""Keys of ``metadata``: the values; numbers of rows at the end of a column that were filled with zeros."""


def attach(metadata: Mapping[str, Any], values: Mapping[str, Any], tokens: int | None = None) -> dict[str, Any]:
    """Return a rollout's metadata with further values, for a rollout or a document of ``add_rollouts``.

    Args:
        metadata: of the rollout, not changed; values attached before stay.
        values: by name: bytes, or a tensor or NumPy array of any shape and dtype, which is kept.
        tokens: makes these columns with a row for each of this many tokens. One row less is allowed, as vLLM reports no
            expert routes for the last token: a row of zeros is added, and :func:`filled_rows` reports it.

    Raises:
        InvalidTrajectoryError: a value has another type or number of rows, or a name is no text; names it.
        CorruptStoreError: ``metadata`` has attached values, but not in the form of this function.
    """
    held, filled = leaves_of(_held(metadata, ATTACHED)), {**_held(metadata, FILLED)}
    _check_mapping("values", values)
    tokens = None if tokens is None else whole_number("tokens", tokens, 0, MAX_STEPS)
    for name, value in values.items():
        if not isinstance(name, str):
            raise InvalidTrajectoryError(f"attached: {shown(name)} is a {type(name).__name__}, must be a text")
        filled.pop(name, None)
        if isinstance(value, bytes) and tokens is None:
            held[name] = base64.b64encode(value).decode()
            continue
        tensor = as_tensor(f"attached.{shown(name)[1:-1]}", value)
        if tensor.dtype not in dtypes().values():
            raise InvalidTrajectoryError(f"field attached.{name}: dtype {tensor.dtype} cannot be stored")
        if tokens is not None:
            if tensor.ndim == 0 or not tokens - 1 <= len(tensor) <= tokens:
                raise InvalidTrajectoryError(
                    f"field attached.{name}: shape {list(tensor.shape)}, must begin with {tokens}, a row for each token"
                )
            if len(tensor) < tokens:
                tensor = torch.cat([tensor, tensor.new_zeros((1, *tensor.shape[1:]))])
                filled[name] = 1
        held[name] = tensor
    result = {**metadata, **({ATTACHED: document_of(held)} if held else {})}
    result.pop(FILLED, None)
    return result | ({FILLED: filled} if filled else {})


def attached(metadata: Mapping[str, Any]) -> dict[str, torch.Tensor | bytes]:
    """Return the values attached to a rollout, by name; see :func:`attach`.

    Raises:
        CorruptStoreError: ``metadata`` does not have them in the form of :func:`attach`.
    """
    return {name: _bytes_of(name, value) for name, value in leaves_of(_held(metadata, ATTACHED)).items()}


def filled_rows(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows at the end of attached columns that were filled with zeros, by name; others have 0."""
    return {**_held(metadata, FILLED)}


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        way = f", as {name}.model_dump() returns" if hasattr(value, "model_dump") else ""
        raise InvalidTrajectoryError(f"{name}: {shown(value)} is a {type(value).__name__}, must be a dict{way}")


def _held(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object of metadata that :func:`attach` made, empty if there is none."""
    _check_mapping("metadata", metadata)
    value = metadata.get(key, {})
    if not isinstance(value, dict):
        raise CorruptStoreError(f"metadata.{key}: {shown(value)}: not made by attach()")
    return value


def summarized(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata to show: attached values, also those of a rollout's rows, by type and shape only."""
    result = {**metadata}
    if isinstance(rows := metadata.get("rows"), list):
        result["rows"] = [summarized(row) if isinstance(row, dict) else row for row in rows]
    if isinstance(document := metadata.get(ATTACHED), dict) and document.keys() <= {"leaves", "tensors"}:
        result[ATTACHED] = {
            name: f"{value[0]} {value[1]}" if isinstance(value, list) else f"{len(str(value)) * 3 // 4} bytes"
            for group in document.values()
            if isinstance(group, dict)
            for name, value in group.items()
        }
    return result


def _bytes_of(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptStoreError(f"metadata.{ATTACHED}.{name}: not the bytes of attach(): {error}") from error
