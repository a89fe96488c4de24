"""What the numbers and names of a trajectory may be: one definition, by which adding and opening go. Pure.

What adding takes can be written and read for ever, so nothing may be taken that opening would refuse.
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
"""Stands for "no version known" inside the index; entries show None."""

UNKNOWN_TIME = -1
"""Stands for "nothing says when it was committed" inside the index: RLinf's directories do not."""

MAX_ID = 1 << 62
"""Highest trajectory id; a store that says it is beyond half of this is refused, so that ids never end."""

MAX_GENERATION = 10**15
"""Most commits of a store: log segments are named by 16 digits."""

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
    "committed": (UNKNOWN_TIME, 1 << 62),
    "start_samples": (0, _INT64.max),
    "start_extra": (0, _INT64.max),
    "start_document": (0, _INT64.max),
}
"""Lowest and highest value of the columns of the index; those that refer to tables aside."""

MAX_STEPS = RANGES["steps"][1]
MAX_SAMPLES = RANGES["num_samples"][1]

MOST_NESTED = 200
"""Levels of dicts and lists; the encoder of documents takes 254 of them."""

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN = 60


def shown(value: Any) -> str:
    """Return a value for a message: short, printable, whatever it is."""
    try:
        text = " ".join(ascii(value).split())  # a tensor's has several lines
    except Exception:  # a value's own repr may do anything, and Python prints no number of 5,000 digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def whole_number(field: str, value: Any, low: int, high: int) -> int:
    """Return a number that a trajectory carries as an int; numpy's and torch's, and floats without fraction, are taken.

    Raises:
        InvalidTrajectoryError: it is none, or lies outside ``[low, high]``.
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
    """Return a whole number of any kind as an int; None if it is none."""
    if isinstance(value, float | np.floating):
        return int(value) if float(value).is_integer() else None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # the latter two from tensors of several numbers, or without any
        return None


def version_number(field: str, value: Any) -> int:
    """Return a policy version.

    Raises:
        InvalidTrajectoryError: it is no whole number, or none of 64 bits.
    """
    low, high = RANGES["version_low"]
    return whole_number(field, value, low + 1, high)  # the lowest stands for "unknown"


def plain_name(field: str, name: Any) -> str:
    """Return a name that can be stored, shown on a terminal, and be part of a file's name.

    Raises:
        InvalidTrajectoryError: it is no string, or has control characters or halves of surrogate pairs in it.
    """
    if not isinstance(name, str):
        raise InvalidTrajectoryError(f"field {field}: {shown(name)} is a {type(name).__name__}, must be a string")
    if not (name.isascii() and name.isprintable()) and (found := _UNFIT.search(name)):
        raise InvalidTrajectoryError(
            f"field {field}: {shown(name)} has the character U+{ord(found[0]):04X}; "
            "control characters and lone surrogates cannot be part of a name"
        )
    return name
