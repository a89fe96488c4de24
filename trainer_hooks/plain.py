"""Any value as JSON with attached tensors, bytes and images. Pure."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from trajstore._core.columns.schema import dtypes
from trajstore.attachments import ATTACHED, attach

_LEAST, _MOST = -(2**63), 2**64 - 1
"""Range of integers in the store."""


def plain(value: Any, values: dict[str, Any] | None = None, name: str = "") -> Any:
    """Convert a value to JSON-like types that the store accepts.

    numpy and torch values become Python's. Other objects, non-finite numbers and integers beyond 64 bits become text;
    lone surrogates are escaped. Never fails, as metadata must not cost the rollout.

    Args:
        value: any.
        values: receives tensors and arrays with a dimension, bytes, and images as PNG, by dotted name; each is
            ``{"trajstore.attached": name}`` in the result.
        name: of the value.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | Mapping):  # the check for dict is much faster
        return {(text := plain(str(key))): plain(item, values, f"{name}.{text}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, values, f"{name}.{place}") for place, item in enumerate(value)]
    if values is not None and (content := _to_attach(value)) is not None:
        values[name] = content
        return {ATTACHED: name}
    if isinstance(value, np.ndarray | Tensor) and value.ndim:
        return plain(value.tolist())
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.item()
    storable = isinstance(value, int) and _LEAST <= value <= _MOST
    storable = storable or (isinstance(value, float) and math.isfinite(value))
    return value if storable else plain(str(value))


def restored(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value of a rollout's metadata with its attached values in place; inverse of :func:`plain`."""
    if isinstance(value, list):
        return [restored(item, values) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ATTACHED}:
        return values.get(value[ATTACHED])
    return {name: restored(item, values) for name, item in value.items()}


def _to_attach(value: Any) -> Any:
    """Return a tensor, array, bytes, or an image as PNG; None for other values."""
    if isinstance(value, bytes) or (isinstance(value, Tensor) and value.ndim and value.dtype in dtypes().values()):
        return None if isinstance(value, Tensor) and value.layout is not torch.strided else value
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biufc":
        return value
    if hasattr(value, "save") and hasattr(value, "getbbox"):  # of Pillow, which need not be installed
        value.save(file := io.BytesIO(), format="PNG")
        return file.getvalue()
    return None


def kept(trainer: str, fields: Mapping[str, Any], of_place: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return metadata with fields of a trainer's rollout under its name, and the names of those that are not exact.

    JSON is exact. Of other values, tensors, arrays, bytes and images are attached, and the rest becomes text.

    Args:
        trainer: key of the metadata.
        fields: by name.
        of_place: names that need not be exact, because a replayed rollout takes them from its place.
    """
    values: dict[str, Any] = {}
    found: dict[str, Any] = {}
    changed = []
    for name, value in fields.items():
        value = value.item() if isinstance(value, np.generic) else value
        try:
            found[name] = orjson.loads(orjson.dumps(value))
            exact = bool(found[name] == value)  # not NaN, a tuple or a data class
        except TypeError:
            exact = False
        if not exact and not (is_dataclass(value) and name in found):
            found[name] = plain(value, values, f"{trainer}.{name}")
        if not (exact or name in of_place):
            changed.append(name)
    return attach({trainer: found}, values), changed
