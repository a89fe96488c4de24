"""Encodes and decodes the state of a saved point: nested plain values and tensors. Pure; no I/O."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore.errors import ConfigurationError, CorruptStoreError

_ARRAY = "__numpy_array__"
"""Key of the dict that represents a numpy array, which ``torch.load(weights_only=True)`` refuses."""

_PLAIN = (bool, int, float, str, bytes, type(None))


def encode_state(state: Mapping[str, Any]) -> memoryview:
    """Return the bytes of a state, in the format of ``torch.save``.

    Args:
        state: dicts, lists, tuples, numbers, texts, bytes, None, tensors and numpy arrays, nested.

    Raises:
        ConfigurationError: it has another type of value; names its place.
    """
    file = io.BytesIO()
    torch.save(_plain(state, "state"), file)
    return file.getbuffer()


def decode_state(data: bytes, source: str) -> dict[str, Any]:
    """Return the state encoded by :func:`encode_state`, without executing any of its content.

    Args:
        data: its bytes.
        source: name of the file, for messages.

    Raises:
        CorruptStoreError: it is not such a state.
    """
    restored: dict[str, Any] = _restored(
        read_plain(data, f"{source}: not the state of a saved point; restore it from a copy")
    )
    return restored


def read_plain(data: bytes, otherwise: str) -> dict[str, Any]:
    """Return a dict written by ``torch.save``, without executing any of its content.

    Args:
        data: its bytes.
        otherwise: error message if it is not a dict.

    Raises:
        CorruptStoreError: it is not a dict, or damaged.
    """
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CorruptStoreError(otherwise) from error
    if not isinstance(state, dict):
        raise CorruptStoreError(otherwise)
    return state


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        return {_ARRAY: _tensor_of(value, where)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}[{at}]") for at, item in enumerate(value))
    raise ConfigurationError(
        f"{where}: a {type(value).__name__} cannot be saved; give plain values, dicts, lists, tuples, tensors, "
        "arrays, or (at the top level) an object with state_dict()"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) not in _PLAIN:
        raise ConfigurationError(f"{where}: a key is a {type(key).__name__}, must be a text or a number")
    return key


def _tensor_of(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError as error:
        raise ConfigurationError(f"{where}: an array of {array.dtype} cannot be saved: {error}") from error


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(item) for item in value)
    return value
