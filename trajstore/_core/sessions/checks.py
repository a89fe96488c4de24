"""Checks the arguments of calls. Pure."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from trajstore._core.columns.limits import shown
from trajstore._core.sessions.tree import LogProbs, Tokens
from trajstore.errors import InvalidCallError, counted

_HIGHEST = (1 << 31) - 1
_LOWEST = float(np.finfo(np.float32).min)


def token_ids(name: str, value: Any) -> Tokens:
    """Return token ids ``[n]`` as int32; the array may alias ``value``.

    Raises:
        InvalidCallError: they are no whole numbers in [0, 2^31).
    """
    quick = _from_list("i", value)
    if quick is not None and int(quick.min(initial=0)) >= 0:
        return quick
    array = _array(name, value)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidCallError(f"{name}: {shown(value)}, must be a list of whole numbers")
    if array.size and (int(array.min()) < 0 or int(array.max()) > _HIGHEST):
        at = int(np.argmax((array < 0) | (array > _HIGHEST)))
        raise InvalidCallError(f"{name}[{at}]: {array[at]}, must be in [0, {_HIGHEST}]")
    return array.astype(np.int32, copy=False)


def sampled_log_probs(value: Any, count: int) -> LogProbs | None:
    """Return the log-probabilities of ``count`` sampled tokens as float32, a copy; None stays None.

    Raises:
        InvalidCallError: their number differs, or one is above 0 or not finite.
    """
    if value is None:
        return None
    quick = _from_list("d", value)
    array = _array("log_probs", value) if quick is None else quick
    if array.size and array.dtype.kind not in "fiu":
        raise InvalidCallError(f"log_probs: {shown(value)}, must be a list of numbers")
    if len(array) != count:
        raise InvalidCallError(
            f"log_probs: has {counted(len(array), 'entry')}, must have one for each of {count} sampled tokens"
        )
    right = (array <= 0) & (array >= _LOWEST)  # not so if it is no number
    if not right.all():
        at = int(np.argmin(right))
        raise InvalidCallError(f"log_probs[{at}]: {array[at]}, must be a finite number of at most 0")
    return array.astype(np.float32)


def _from_list(code: str, value: Any) -> np.ndarray[Any, Any] | None:
    """Return the numbers of a list as an array, in half the time of numpy; None if they are other numbers."""
    try:
        is_plain = type(value) is list and bool(value) and type(value[0]) is not bool
        return np.frombuffer(struct.pack(f"{len(value)}{code}", *value), code) if is_plain else None
    except struct.error:
        return None


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):  # a tensor: perhaps on a device, or of a dtype that numpy lacks
        value = value.detach().to("cpu")
        value = value.float() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # ragged
        array = np.zeros((), np.object_)
    if array.ndim != 1:
        raise InvalidCallError(f"{name}: {shown(value)}, must be a list of numbers, one for each token")
    return array
