"""Leaves without a row per step, which are kept in a trajectory's JSON document. Pure.

JSON values are stored unchanged. Tensors without a row for each step and environment (scalars, one dimension)
are stored as dtype, shape and bytes; they are returned and never sampled.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import orjson
import torch

from trajstore.core.columns.document import LEAVES
from trajstore.core.columns.schema import DOCUMENT, dtypes
from trajstore.errors import CorruptStoreError

_VALUES, _TENSORS = LEAVES, "tensors"


def document_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a step trajectory's leaves that are not columns; empty if there are none.

    Args:
        leaves: JSON values and CPU tensors, by dotted name.
    """
    document: dict[str, Any] = {}
    for name, value in leaves.items():
        if isinstance(value, torch.Tensor):
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            described = [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]
            document.setdefault(_TENSORS, {})[name] = described
        else:
            document.setdefault(_VALUES, {})[name] = value
    return document


def leaves_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a document by dotted name; inverse of :func:`document_of`.

    Raises:
        CorruptStoreError: the document does not describe leaves.
    """
    leaves = document.get(_VALUES, {})
    tensors = document.get(_TENSORS, {})
    if not isinstance(leaves, dict) or not isinstance(tensors, dict):
        raise CorruptStoreError(f"column {DOCUMENT}: leaves and tensors must be objects")
    return {**leaves, **{name: _tensor_of(name, described) for name, described in tensors.items()}}


def _tensor_of(name: str, described: Any) -> torch.Tensor:
    try:
        dtype, shape, text = described
        data = bytearray(base64.b64decode(text, validate=True))
        if not data:
            return torch.empty(shape, dtype=dtypes()[dtype])
        return torch.frombuffer(data, dtype=torch.uint8).view(dtypes()[dtype]).reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise CorruptStoreError(f"column {DOCUMENT}: {name} does not describe a tensor: {error}") from error


def is_json(value: Any) -> bool:
    """Return whether a value round-trips through JSON unchanged."""
    try:
        return bool(orjson.loads(orjson.dumps(value)) == value)
    except (TypeError, ValueError, RuntimeError):  # not JSON, or with a tensor that cannot be compared
        return False
