"""Names of pins: which one may choose, and which are those of saved points and rollbacks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from trajstore.errors import ConfigurationError

STEP = re.compile(r"step-(\d+)")
"""The saved point of a step."""

ASIDE = re.compile(r"aside-(\d+)(?:-step-(\d+))?")
"""What a rollback set aside, or a saved point that it set aside."""

IN_UTF8 = "start Python with PYTHONUTF8=1, or choose another locale than LC_ALL=C"
"""What to do where names of files cannot be read or written."""

_LONGEST = 200  # bytes: file systems take 255, and ".json" or a state's suffix follows
_UNFIT = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]")


def point_name(step: int) -> str:
    """Return the name of the pin that is the saved point of a step."""
    return f"step-{step}"


def aside_name(generation: int, step: int | None = None) -> str:
    """Return the name of the pin of what a rollback set aside, or of a saved point that it set aside."""
    return f"aside-{generation}" + ("" if step is None else f"-{point_name(step)}")


def removal_order(names: Iterable[str]) -> list[list[str]]:
    """Return names of pins that go together in the groups in which they must go, none of which is empty.

    What rollbacks set aside goes last: without it nothing says which points are void, or deleted with it.
    """
    groups: tuple[list[str], list[str]] = ([], [])
    for name in names:
        match = ASIDE.fullmatch(name)
        groups[match is not None and match[2] is None].append(name)
    return [group for group in groups if group]


def check_pin_name(name: str) -> None:
    """Refuse a name that cannot be that of a user's pin.

    Raises:
        ConfigurationError: it cannot be the name of a file right in the folder of pins, or is that of a saved point, or
            of what a rollback set aside.
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
