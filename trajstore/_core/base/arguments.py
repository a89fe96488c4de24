"""Checks arguments of public calls; errors have name, value and remedy. Pure."""

from __future__ import annotations

import math
from collections.abc import KeysView, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.limits import as_int, shown
from trajstore.errors import ConfigurationError

INT64_MAX = (1 << 63) - 1
LONGEST = 1e9
"""Longest time in seconds that a lock can wait."""


def whole(name: str, value: Any, least: int, most: int = INT64_MAX) -> int:
    """Return a whole-number argument; accepts numpy's, and floats without fraction (YAML's ``1e6``).

    Raises:
        ConfigurationError: it is something else, or outside ``[least, most]``.
    """
    if type(value) is int and least <= value <= most:
        return value
    number = None if isinstance(value, bool | np.bool_) else as_int(value)
    if number is None:
        raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be a whole number")
    if not least <= number <= most:
        most_text = f" and at most {most}" if most < INT64_MAX or number > most else ""
        raise ConfigurationError(f"{name}: {shown(number)}, must be at least {least}{most_text}")
    return number


def transitions(num_chunks: Any) -> int:
    """Return the number of transitions to draw, which RLinf and so all draws name ``num_chunks``.

    Raises:
        ConfigurationError: it is no whole number, or below 1.
    """
    return whole("num_chunks (the number of transitions)", num_chunks, 1)


def whole_or_none(name: str, value: Any, least: int, most: int = INT64_MAX) -> int | None:
    """Return an argument that is a whole number or None; see :func:`whole`.

    Raises:
        ConfigurationError: it is neither, or out of range.
    """
    return None if value is None else whole(name, value, least, most)


def seconds(name: str, value: Any) -> float:
    """Return a duration in seconds.

    Raises:
        ConfigurationError: it is not a finite number, or negative.
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            duration = float(value)
        except OverflowError:
            duration = math.inf
        if 0 <= duration <= LONGEST:
            return duration
    raise ConfigurationError(f"{name}: {shown(value)}, must be a number of seconds, at least 0 and at most {LONGEST:g}")


def seconds_or_none(name: str, value: Any) -> float | None:
    """Return a duration in seconds or None; see :func:`seconds`.

    Raises:
        ConfigurationError: it is neither.
    """
    return None if value is None else seconds(name, value)


def text(name: str, value: Any) -> str:
    """Return a nonempty text.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(value, str) and value:
        return value
    problem = "is empty" if isinstance(value, str) else f"is a {type(value).__name__}"
    raise ConfigurationError(f"{name}: {shown(value)} {problem}, must be a text")


def texts(name: str, value: Any, remedy: str = "") -> Sequence[str]:
    """Return a list of texts; a single text is refused.

    Raises:
        ConfigurationError: it is something else; a single text would be taken letter by letter.
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{name}: {shown(value)} is one text, must be a list of them: {name}=[{shown(value)}]")
    if isinstance(value, Sequence | Set | KeysView) and all(isinstance(item, str) for item in value):
        return list(value)
    raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be a list of texts{remedy}")


def columns_or_none(value: Any) -> Sequence[str] | None:
    """Return the names of the columns wanted; None for all.

    Raises:
        ConfigurationError: it is not a list of names, or empty.
    """
    if value is None:
        return None
    names = texts("columns", value, " (dotted names), or None for all")
    if not names:
        raise ConfigurationError("columns: empty; pass a list of dotted names, or None for all")
    return names


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """Return one of the known texts.

    Raises:
        ConfigurationError: it is another; lists them.
    """
    if isinstance(value, str) and value in known:
        return value
    raise ConfigurationError(f"{name}: {shown(value)}, must be one of {', '.join(map(repr, known))}")


def whole_numbers(name: str, value: Any) -> npt.NDArray[np.int64]:
    """Return a list, range, array or tensor of whole numbers as an array ``[n]``.

    Raises:
        ConfigurationError: it is something else, a single number, or has more than one dimension.
    """
    try:
        if isinstance(value, range):  # numpy would make an object of each number
            value = np.arange(value.start, value.stop, value.step)
        array = np.asarray(list(value) if isinstance(value, Set | KeysView) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # ragged, on another device, or numbers out of range
        array = np.zeros((), np.object_)
    fits = array.ndim == 1 and (not array.size or array.dtype.kind == "i")
    if array.dtype.kind == "u" and array.ndim == 1:
        fits = bool(array.max(initial=0) <= INT64_MAX)
    if not fits or isinstance(value, str | bytes | Mapping):
        raise ConfigurationError(
            f"{name}: {shown(value)} is a {type(value).__name__}, must be a list of whole numbers, as {name}=[0, 1]"
        )
    return array.astype(np.int64, copy=False)


def numbers(name: str, value: Any) -> npt.NDArray[np.float64]:
    """Return a list, array or tensor of numbers as float64, detached from any graph.

    Raises:
        ConfigurationError: it is something else.
    """
    if hasattr(value, "detach") and not value.is_complex():  # perhaps with a gradient, or of a dtype that numpy lacks
        value = value.detach().to("cpu").double()
    try:
        array = np.asarray(value)
        if array.dtype.kind in "iuf" or not array.size:
            return array.astype(np.float64, copy=False)
    except (TypeError, ValueError, RuntimeError):  # ragged, or not numbers
        pass
    raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be a list of numbers")


def path_or_url(name: str, value: Any) -> str | Path:
    """Return a path or URL.

    Raises:
        ConfigurationError: it is something else, or empty.
    """
    if isinstance(value, str | Path) and str(value):
        return value
    raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be a path or URL")


def check_instance(name: str, value: Any, kind: Any, wanted: str) -> Any:
    """Return an argument of a type; None is refused.

    Raises:
        ConfigurationError: it is of another type.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be {wanted}")
    return value


def truth(name: str, value: Any) -> bool:
    """Return a bool.

    Raises:
        ConfigurationError: it is something else, such as the truthy text ``"false"``.
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise ConfigurationError(f"{name}: {shown(value)} is a {type(value).__name__}, must be true or false")


def check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Refuse an argument of another type; None passes.

    Raises:
        ConfigurationError: it is of another type.
    """
    if value is not None:
        check_instance(name, value, kind, wanted)


def share(name: str, value: Any) -> float:
    """Return a number in [0, 1].

    Raises:
        ConfigurationError: it is something else.
    """
    if is_number(value) and 0 <= value <= 1:
        return float(value)
    raise ConfigurationError(f"{name}: {shown(value)}, must be a number in [0, 1]")


def finite(name: str, value: Any, least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> float:
    """Return a finite number.

    Args:
        name: of the argument.
        value: of the argument.
        least: lowest accepted value.
        most: highest accepted value.
        above: refuse ``least`` itself.

    Raises:
        ConfigurationError: it is not a finite number, or out of range.
    """
    if is_number(value):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and least <= number <= most and not (above and number == least):
            return number
    wanted = "must be a finite number"
    if math.isfinite(least):
        wanted += f" above {least:g}" if above else f" of at least {least:g}"
    raise ConfigurationError(
        f"{name}: {shown(value)}, {wanted}" + (f" and at most {most:g}" if math.isfinite(most) else "")
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number, including numpy's; bools are not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def rank_of_ranks(name: str, value: Any) -> tuple[int, int]:
    """Return a pair (rank, number of ranks).

    Raises:
        ConfigurationError: it is not such a pair, or the rank is out of range.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        rank, ranks = whole(name, value[0], 0), whole(name, value[1], 1)
        if rank < ranks:
            return rank, ranks
    raise ConfigurationError(f"{name}: {shown(value)}, must be (r, W) with 0 <= r < W")
