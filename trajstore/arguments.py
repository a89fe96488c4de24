"""Arguments of public constructors: checked where they are given, by name, value and remedy. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trajstore.columns.limits import as_int, shown
from trajstore.errors import ConfigurationError

INT64_MAX = (1 << 63) - 1


def whole(name: str, value: Any, least: int, most: int = INT64_MAX) -> int:
    """Return an argument that is a whole number; numpy's are taken, and floats without fraction (YAML's ``1e6``).

    Raises:
        ConfigurationError: it is none, or lies outside ``[least, most]``.
    """
    number = None if isinstance(value, bool | np.bool_) else as_int(value)
    if number is None:
        raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be a whole number")
    if not least <= number <= most:
        most_text = f" and at most {most}" if most < INT64_MAX else ""
        raise ConfigurationError(f"{name}: {shown(number)}, must be at least {least}{most_text}")
    return number


def whole_or_none(name: str, value: Any, least: int, most: int = INT64_MAX) -> int | None:
    """Return an argument that is a whole number or None; see :func:`whole`.

    Raises:
        ConfigurationError: it is neither, or out of range.
    """
    return None if value is None else whole(name, value, least, most)


def seconds(name: str, value: Any) -> float:
    """Return an argument that is a length of time.

    Raises:
        ConfigurationError: it is no finite number, or negative.
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and number >= 0:
            return number
    raise ConfigurationError(f"{name}: {shown(value)}, must be a number of seconds, at least 0")


def truth(name: str, value: Any) -> bool:
    """Return an argument that is true or false.

    Raises:
        ConfigurationError: it is another thing, which Python might take for either (``"false"`` for true).
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be true or false")


def check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Refuse an argument of another type; None passes.

    Raises:
        ConfigurationError: it is of another type.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be {wanted}")


def share(name: str, value: Any) -> float:
    """Return an argument that is a number in [0, 1].

    Raises:
        ConfigurationError: it is another thing.
    """
    if is_number(value) and 0 <= value <= 1:
        return float(value)
    raise ConfigurationError(f"{name}: {shown(value)}, must be a number in [0, 1]")


def finite(name: str, value: Any, least: float = -math.inf) -> float:
    """Return an argument that is a finite number.

    Raises:
        ConfigurationError: it is none, or below ``least``.
    """
    if is_number(value) and math.isfinite(value) and value >= least:
        return float(value)
    wanted = "must be a finite number" + (f" of at least {least:g}" if math.isfinite(least) else "")
    raise ConfigurationError(f"{name}: {shown(value)}, {wanted}")


def is_number(value: Any) -> bool:
    """Return whether a value is a number, numpy's among them; true and false are none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
