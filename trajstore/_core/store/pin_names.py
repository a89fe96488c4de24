"""Names of snapshots: users' pins, saved points, and heads that were left."""

from __future__ import annotations

import os
import re

from trajstore.errors import ConfigurationError

STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""A saved point: its step, and the visit in which it was saved. Without a visit: the point on the current line."""

ASIDE = re.compile(r"aside-(\d+)")
"""A head that was left."""

IN_UTF8 = "start Python with PYTHONUTF8=1, or choose another locale than LC_ALL=C"
"""Remedy where file names cannot be read or written."""

_LONGEST = 200  # bytes: file systems take 255, and ".json" or a state's suffix follows
_UNFIT = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]")


def point_name(step: int, visit: int | None = None) -> str:
    """Return the name of the saved point of a step; without a visit, the one on the current line."""
    return f"step-{step}" + ("" if visit is None else f".{visit}")


def aside_name(generation: int) -> str:
    """Return the name of the head left by the commit of a generation."""
    return f"aside-{generation}"


def check_pin_name(name: str) -> None:
    """Refuse an invalid name for a user's pin.

    Raises:
        ConfigurationError: it is not a valid file name, or is reserved for saved points or heads that were left.
    """
    fits = not name.startswith(".") and not _UNFIT.search(name)
    if not fits or not 0 < len(name.encode(errors="replace")) <= _LONGEST:
        raise ConfigurationError(
            f"pin {name[:80]!r}: must be the name of a file: at most {_LONGEST} bytes, no slashes or control "
            "characters, no dot at its beginning"
        )
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"pin {name[:80]!a}: names of files are {error.encoding} here; {IN_UTF8}") from error
    if STEP.fullmatch(name) or ASIDE.fullmatch(name):
        raise ConfigurationError(f"pin {name!r}: such names are reserved for saved points; choose another")
