"""Valid ranges of a trajectory's numbers and names, for adding and opening alike. Pure.

Accepted values must stay readable for ever, so adding accepts nothing that opening would refuse.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.errors import InvalidTrajectoryError

_INT32, _INT64 = np.iinfo(np.int32), np.iinfo(np.int64)

UNKNOWN_VERSION = int(_INT64.min)
"""Value for an unknown version in the index; entries show None."""

UNKNOWN_TIME = -1
"""Value for an unknown commit time in the index, as in RLinf's directories."""

MAX_ID = 1 << 62
"""Highest trajectory id; a store with a counter above half of this is refused, so that ids never run out."""

MAX_GENERATION = 10**15
"""Largest number of commits of a store: names of log segments have 16 digits."""

RANGES: Mapping[str, tuple[int, int]] = {
    "trajectory_id": (0, MAX_ID),
    "num_samples": (0, 1 << 40),
    "steps": (0, _INT32.max),
    "batch": (0, _INT32.max),
    "extra": (0, _INT32.max),
    "document": (0, _INT32.max),
    "nbytes": (0, _INT64.max),
    "max_episode_length": (0, _INT64.max),
    "version_low": (UNKNOWN_VERSION, _INT64.max),
    "version_high": (UNKNOWN_VERSION, _INT64.max),
    "committed": (UNKNOWN_TIME, 253_402_300_799_999_999),  # the end of the year 9999: datetime has no later one
    "start_samples": (0, _INT64.max),
    "start_extra": (0, _INT64.max),
    "start_document": (0, _INT64.max),
}
"""Lowest and highest values of the index's columns, except references to tables."""

MAX_STEPS = RANGES["steps"][1]
MAX_SAMPLES = RANGES["num_samples"][1]

MOST_NESTED = 200
"""Nesting limit of dicts and lists; the encoder of documents supports 254."""

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN = 60


def shown(value: Any) -> str:
    """Return any value as a short printable text, for a message."""
    try:
        text = " ".join(ascii(value).split())  # tensors print on several lines
    except Exception:  # a custom repr may raise anything, and Python prints no number of 5,000 digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def whole_number(field: str, value: Any, low: int, high: int) -> int:
    """Return an int of a trajectory; accepts numpy's and torch's, and floats without fraction.

    Raises:
        InvalidTrajectoryError: it is something else, or outside ``[low, high]``.
    """
    number: int | None = value if type(value) is int else as_int(value)
    if number is None:
        raise InvalidTrajectoryError(
            f"field {field}: {shown(value)} is a {type(value).__name__}, must be a whole number"
        )
    if not low <= number <= high:
        raise InvalidTrajectoryError(f"field {field}: {shown(number)}, must be in [{low}, {high}]")
    return number


def as_int(value: Any) -> int | None:
    """Return a whole number of any type as an int; None for other values."""
    if isinstance(value, float | np.floating):
        return int(value) if float(value).is_integer() else None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # the latter two from tensors with several values or none
        return None


def version_number(field: str, value: Any) -> int:
    """Return a policy version.

    Raises:
        InvalidTrajectoryError: it is not a whole number, or exceeds 64 bits.
    """
    low, high = RANGES["version_low"]
    return whole_number(field, value, low + 1, high)  # the lowest value is "unknown"


def plain_name(field: str, name: Any) -> str:
    """Return a name that can be stored, shown on a terminal, and used in a file name.

    Raises:
        InvalidTrajectoryError: it is not a string, or contains control characters or lone surrogates.
    """
    if not isinstance(name, str):
        raise InvalidTrajectoryError(f"field {field}: {shown(name)} is a {type(name).__name__}, must be a string")
    if not (name.isascii() and name.isprintable()) and (found := _UNFIT.search(name)):
        raise InvalidTrajectoryError(
            f"field {field}: {shown(name)} has the character U+{ord(found[0]):04X}; "
            "control characters and lone surrogates cannot be part of a name"
        )
    return name
