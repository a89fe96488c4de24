"""Equality of values in every bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.flat import raw_bytes


def same(one: Any, other: Any) -> bool:
    """Return whether two values agree in dtype, shape and every bit: NaN equals itself, -0.0 is not 0.0.

    Mappings, lists, tuples and dataclasses are compared by their items.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        pair = one.contiguous(), other.contiguous()
        return (one.dtype, one.shape) == (other.dtype, other.shape) and raw_bytes(pair[0]) == raw_bytes(pair[1])
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one) and type(one) is type(other):
        return same(vars(one), vars(other))
    if isinstance(one, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        return False
    return bool(one == other) or repr(one) == repr(other)  # of NaN
