"""Converts field values to contiguous CPU tensors, and other values to one document column. Pure."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.columns.document import encode_document
from trajstore.core.columns.fields import Axis
from trajstore.core.columns.schema import DOCUMENT, dtypes
from trajstore.errors import InvalidTrajectoryError

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
        value = _from_numpy(name, value)
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


def _from_numpy(name: str, value: npt.NDArray[Any]) -> torch.Tensor:
    if not value.flags.c_contiguous or not value.flags.writeable:  # torch would warn of the latter
        value = value.copy(order="C")
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:  # texts, objects, or the other byte order
        raise InvalidTrajectoryError(f"field {name}: numpy's dtype {value.dtype} cannot be stored") from error


def document_column(
    document: dict[str, Any],
    columns: list[NewColumn],
    tensors: list[torch.Tensor],
) -> int:
    """Append the document's column, unless the document is empty, and return its number of bytes."""
    if not document:
        return 0
    text = encode_document(document)
    columns.append((DOCUMENT, torch.uint8, (), Axis.DOCUMENT))
    tensors.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return len(text)
