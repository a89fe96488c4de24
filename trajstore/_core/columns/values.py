"""Converts field values to contiguous CPU tensors, and other values to one document column. Pure.

Leaves without a row per step and environment are kept in the document: JSON values unchanged, tensors (scalars, one
dimension) as dtype, shape and bytes. They are returned and never sampled.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trajstore._core.columns.document import LEAVES, encode_document
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import DOCUMENT, dtypes
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError

NewColumn = tuple[str, torch.dtype, tuple[int, ...], Axis]
"""Name, dtype, row shape and axis of a new column."""


@cache
def _plain_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of tensors that are neither quantized nor possibly conjugated."""
    return frozenset(dtype for dtype in dtypes().values() if not dtype.is_complex)


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return ``value`` as a contiguous CPU tensor; accepts numpy arrays."""
    if (  # the usual case, checked in a third of the time
        type(value) is torch.Tensor
        and value.dtype in _plain_dtypes()
        and value.is_cpu
        and not value.requires_grad
        and value.layout is torch.strided
        and not value.is_nested
        and value.is_contiguous()
        and not value.is_neg()
    ):
        return value
    if isinstance(value, np.ndarray):
        value = from_numpy(name, value)
    if not isinstance(value, torch.Tensor):
        raise InvalidTrajectoryError(f"field {name}: must be a tensor, is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise InvalidTrajectoryError(
            f"field {name}: sparse, nested and quantized tensors cannot be stored; make it dense"
        )
    if value.is_meta:
        raise InvalidTrajectoryError(f"field {name}: a tensor on the device 'meta' has no values to store")
    if value.requires_grad:
        value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    if value.dtype.is_complex or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    tensor: torch.Tensor = value if value.is_contiguous() else value.contiguous()
    return tensor


def from_numpy(name: str, value: npt.NDArray[Any]) -> torch.Tensor:
    """Return a writable, contiguous array as a tensor that shares its memory, others as a copy.

    Raises:
        InvalidTrajectoryError: torch lacks its dtype, or values are masked.
    """
    if np.ma.is_masked(value):
        raise InvalidTrajectoryError(f"field {name}: a masked array would lose its mask; give its filled() values")
    if not value.flags.c_contiguous or not value.flags.writeable:  # torch would warn of the latter
        value = value.copy(order="C")
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:  # texts, objects, or the other byte order
        raise InvalidTrajectoryError(f"field {name}: numpy's dtype {value.dtype} cannot be stored") from error


def document_column(document: dict[str, Any], columns: list[NewColumn], tensors: list[torch.Tensor]) -> int:
    """Append the document's column, unless the document is empty, and return its number of bytes."""
    if not document:
        return 0
    text = encode_document(document)
    columns.append((DOCUMENT, torch.uint8, (), Axis.DOCUMENT))
    tensors.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return len(text)


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
