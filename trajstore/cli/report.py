"""Write reports, which are JSON values, as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trajstore.cli.output import Output, format_bytes, format_number, format_range, shortened

_LONGEST_VALUE = 100  # characters of a value in a table
_LONGEST_ROW = 12  # numbers shown (rounded) from a list; longer lists show shape and range
_MOST_TEXTS = 10  # texts shown from a list
_MOST_ROWS = 50  # rows shown of a table


def write(report: Mapping[str, Any], out: Output, without: Collection[str] = ()) -> None:
    """Write a report: values and ranges by name, then a table for each list of objects; unknown values are left out.

    Args:
        report: JSON values; a nested object's values have its name before their own.
        out: the output.
        without: names to leave out.
    """
    known = {name: value for name, value in report.items() if name not in without}
    tables = {name: value for name, value in known.items() if _is_table(value)}
    out.pairs([row for name, value in known.items() if name not in tables for row in _rows(_words(name), name, value)])
    for name, rows in tables.items():
        out.heading(_words(name))
        write_table(rows, out)


def write_table(rows: Sequence[Mapping[str, Any]], out: Output) -> None:
    """Write objects as rows, with the names of their known values above; further rows are counted."""
    names = [*dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)]
    numbers = [at for at, name in enumerate(names) if all(_is_number(row.get(name)) for row in rows)]
    cells = [[cell(name, row.get(name)) for name in names] for row in rows[:_MOST_ROWS]]
    out.table([[_words(name) for name in names], *cells], right=numbers)
    if len(rows) > _MOST_ROWS:
        out.line(f"  and {len(rows) - _MOST_ROWS:,} more; --json has all")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _rows(label: str, name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and not {"min", "max"} <= value.keys():
        for inner, item in value.items():
            yield from _rows(f"{label} {_words(inner)}", inner, item)
    elif isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        left = len(value) - _MOST_TEXTS
        texts = [*value[:_MOST_TEXTS], *([f"and {left:,} more; --json has all"] if left > 0 else [])]
        yield from ((label if not at else " " * len(label), text) for at, text in enumerate(texts))
    else:
        yield label, cell(name, value)


_TIMES: Mapping[str, Callable[[Any], datetime]] = {
    "time": lambda value: datetime.fromtimestamp(value / 1e6, UTC),
    "at": lambda value: datetime.fromtimestamp(value, UTC),
}
"""Moments by the names that they have in reports."""


def cell(name: str, value: Any) -> str:
    """Return a report's value of this name as text: long texts shortened, many numbers as shape and range."""
    if value is None or value in ({}, []):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name in _TIMES:
            return _TIMES[name](value).strftime("%Y-%m-%d %H:%M:%S")
        return format_bytes(value) if name.endswith(("bytes", "size_on_disk", "uncompressed")) else format_number(value)
    if isinstance(value, Mapping) and {"min", "max"} <= value.keys():
        others = [f", {key} {format_number(value[key])}" for key in value if key not in ("min", "mean", "max")]
        return format_range(dict(value)) + "".join(others)
    return shown_value(value)


def shown_value(value: Any, longest: int | None = None) -> str:
    """Return a recorded value as text for a table: long texts shortened, many numbers as shape and range.

    Args:
        value: JSON.
        longest: most characters of a text; None: 100.
    """
    text, most = str(value), longest or _LONGEST_VALUE
    if len(text) <= most:
        return text
    shape, numbers = _array(value)
    if not numbers:
        return shortened(text, most)
    if len(shape) == 1 and len(numbers) <= _LONGEST_ROW:
        return f"[{', '.join(f'{number:.4g}' for number in numbers)}]"
    finite = [number for number in numbers if math.isfinite(number)]
    parts = [str(shape)]
    if finite:
        parts.append(format_range({"min": min(finite), "max": max(finite)}))
    if len(finite) < len(numbers):
        parts.append(f"{len(numbers) - len(finite):,} not finite")
    return f"{', '.join(parts)} (--json shows all)"


def _array(value: Any) -> tuple[list[int], list[float]]:
    """Return shape and numbers of nested lists that form an array; no numbers if they do not."""
    shape: list[int] = []
    level = [value]
    while level and all(isinstance(item, list) for item in level):
        lengths = {len(item) for item in level}
        if len(lengths) > 1:
            return [], []
        shape += lengths
        level = [part for item in level for part in item]
    return shape, level if all(isinstance(item, int | float) for item in level) else []
