"""The part of a trajectory that is not tensors, as JSON: values round-trip exactly, or are refused. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from trajstore._core.columns.limits import MOST_NESTED, RANGES, shown
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError

LEAVES = "leaves"
"""Part of a step trajectory's document with the JSON leaves of its dicts, by dotted name."""

_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1


def encode_document(document: dict[str, Any]) -> bytes:
    """Encode a document as JSON that reads back equal.

    Numpy's scalars and arrays become numbers and lists, tuples become lists. Other values without a JSON equivalent are
    refused, including those that JSON would change (NaN to null, dates to text).

    Raises:
        InvalidTrajectoryError: names the place of a value that cannot be stored.
    """
    try:
        data = orjson.dumps(document)
    except (TypeError, ValueError, RecursionError):  # find the refused value and its place
        return _checked(orjson.dumps(_json_of(document, "")))
    # The encoder silently writes null for NaN, and text for UUIDs and dates.
    return _checked(data if _is_plain(document) else orjson.dumps(_json_of(document, "")))


_ATOMS = frozenset({str, int, bool, type(None)})


def _is_plain(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether a value consists only of types that round-trip unchanged."""
    for item in value.values() if isinstance(value, dict) else value:
        kind = type(item)
        if kind in _ATOMS:
            continue
        if kind is float:
            if not math.isfinite(item):
                return False
        elif not ((kind is dict or kind is list) and _is_plain(item)):
            return False
    return True


def _checked(data: bytes) -> bytes:
    most = RANGES["document"][1]
    if len(data) > most:
        raise InvalidTrajectoryError(f"the fields that are not tensors take {len(data)} bytes as JSON, most is {most}")
    return data


def _json_of(value: Any, path: str, depth: int = 0) -> Any:
    """Convert a value to JSON types.

    Raises:
        InvalidTrajectoryError: it, or a part of it, has no JSON equivalent; names the path.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _text_of(value, path)
    if isinstance(value, int):
        if not _LOWEST <= value <= _HIGHEST:
            raise _refusal(path, f"{shown(value)} needs more than 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refusal(path, f"{value} has no equal in JSON; use None, or a string")
        return float(value)
    if depth >= MOST_NESTED:
        raise _refusal(path, f"nested in more than {MOST_NESTED} lists and dicts")
    if isinstance(value, list | tuple):
        return [_json_of(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _object_of(value, path, depth)
    remedy = "model_dump(exclude_none=True)" if hasattr(value, "model_dump") else "text or its parts"
    raise _refusal(path, f"a {type(value).__name__} has no equal in JSON; store its {remedy}")


def _object_of(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    result = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _refusal(path, f"key {shown(key)} is a {type(key).__name__}; use string keys")
        inner = f"{path}.{shown(key)[1:-1]}" if path else shown(key)[1:-1]
        result[_text_of(key, inner)] = _json_of(item, inner, depth + 1)
    return result


def _text_of(value: str, path: str) -> str:
    try:
        return value.encode().decode()  # converts subclasses of str
    except UnicodeEncodeError as error:
        raise _refusal(
            path, f"the text has half of a surrogate pair at character {error.start}: {shown(value[error.start :])}"
        ) from error


def _refusal(path: str, what: str) -> InvalidTrajectoryError:
    path = path.removeprefix(f"{LEAVES}.")  # users know the leaf's own name
    name = path if len(path) <= 200 else f"{path[:100]}...{path[-97:]}"
    return InvalidTrajectoryError(f"field {name}: {what}")


def decode_document(data: bytes) -> dict[str, Any]:
    """Parse the stored bytes of a document.

    Raises:
        CorruptStoreError: they are not a JSON object.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptStoreError("not a JSON object")
    return document
