"""Names of snapshots: those that users choose for pins, and those of saved points and of heads that were left."""

from __future__ import annotations

import os
import re

from trajstore.errors import ConfigurationError

STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""A saved point: its step, and the visit in which it was saved. Without the visit: the one on the current line."""

ASIDE = re.compile(r"aside-(\d+)")
"""A head that was left."""

IN_UTF8 = "start Python with PYTHONUTF8=1, or choose another locale than LC_ALL=C"
"""What to do where names of files cannot be read or written."""

_LONGEST = 200  # bytes: file systems take 255, and ".json" or a state's suffix follows
_UNFIT = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]")


def point_name(step: int, visit: int | None = None) -> str:
    """Return the name of the saved point of a step; without a visit: of the one on the current line."""
    return f"step-{step}" + ("" if visit is None else f".{visit}")


def aside_name(generation: int) -> str:
    """Return the name of the head that is left by the commit of a generation."""
    return f"aside-{generation}"


def check_pin_name(name: str) -> None:
    """Refuse a name that cannot be that of a user's pin.

    Raises:
        ConfigurationError: it cannot be the name of a file right in the folder of pins, or is that of a saved point, or
            of a head that was left.
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
        raise ConfigurationError(f"pin {name!r}: names like this are those of saved points; choose another")
