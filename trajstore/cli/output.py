"""Output of commands: lines, tables, JSON, readable numbers, a progress bar."""

from __future__ import annotations

import datetime as dt
import json
import math
import select
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Self, TextIO
from unicodedata import category

_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of control and invisible characters."""

_SHOWN = 50
"""Maximum number of problems that are listed."""

_LONGEST_TEXT, _MOST_LINES = 2_000, 20
"""Characters and lines of a text that are shown."""

_NARROWEST = 12
"""Least width that a column is cut to."""

_LONGEST_WAIT = (1 << 31) - 1
"""Maximum milliseconds that ``poll`` takes."""


def visible(text: str) -> str:
    """Return text with control characters and direction marks escaped.

    A model's output must not move the cursor, set titles or forge lines of a report.
    """
    if text.isprintable():  # the common case
        return text
    return "".join(
        c if c.isprintable() or category(c) not in _HIDDEN else c.encode("unicode_escape").decode() for c in text
    )


def shortened(text: str, limit: int) -> str:
    """Return text, shortened if long, with the number of characters left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit:,} more characters)"


class Output:
    """Writes results to a stream (standard output). Control characters in data never reach a terminal unescaped."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self.width = shutil.get_terminal_size().columns if width is None and stream.isatty() else width
        """Columns of the terminal; None elsewhere."""

    def line(self, text: str = "") -> None:
        """Write one line; characters outside the stream's encoding are escaped."""
        shown = visible(text).encode(self._encoding, "backslashreplace").decode(self._encoding)
        self._stream.write(shown + "\n")

    def wait(self, seconds: float) -> None:
        """Wait; a stream without a descriptor cannot be closed by its reader.

        Raises:
            BrokenPipeError: the reader of the output has closed it.
        """
        try:
            descriptor = self._stream.fileno()
        except OSError:
            time.sleep(seconds)
            return
        poll = select.poll()
        poll.register(descriptor, 0)  # errors are always reported
        if poll.poll(math.ceil(min(seconds * 1000, _LONGEST_WAIT))):
            raise BrokenPipeError

    def text(self, text: str, full: bool = False) -> None:
        """Write text of several lines with a bar before each, so that none can pass for a line of the report.

        Args:
            text: any text.
            full: write all of it, not only the first 20 lines and 2,000 characters.
        """
        kept = text if full else "\n".join(text[:_LONGEST_TEXT].split("\n")[:_MOST_LINES])
        for line in map(visible, kept.split("\n")):
            wide = max(20, self.width - 4) if self.width else len(line) or 1  # a terminal would go on without the bar
            for at in range(0, len(line) or 1, wide):
                self.line(f"  | {line[at : at + wide]}")
        if left := len(text) - len(kept):
            lines = text.count("\n", len(kept))
            more = f"{lines:,} more lines, " if lines else ""
            self.line(f"  ({more}{left:,} more characters; --full shows all)")

    def problems(self, lines: Sequence[str], above: str, where: str = "--json lists all") -> None:
        """Write the first 50 lines about damage; ``above`` starts the line that counts the rest."""
        for line in lines[:_SHOWN]:
            self.line(line)
        if len(lines) > _SHOWN:
            self.line(f"{above}and {len(lines) - _SHOWN:,} more; {where}")

    def json(self, value: Any, indent: int | None = 2) -> None:
        """Write a JSON document or a result's fields, keys in their order, indented or (None) on one line."""
        plain = self._encoding.lower().replace("-", "") != "utf8"
        text = json.dumps(_json_value(value), indent=indent, ensure_ascii=plain, allow_nan=False)
        if not text.replace("\n", "").isprintable():  # the line feeds here are JSON's own
            text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        self._stream.write(text + "\n")

    def heading(self, text: str) -> None:
        """Write a title after an empty line."""
        self.line()
        self.line(text)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and values in two columns; rows with an empty value are left out."""
        self.table([row for row in rows if row[1]])

    def table(self, rows: Sequence[Sequence[str]], right: Sequence[int] = (), fitted: bool = False) -> None:
        """Write rows of equal length in aligned columns.

        Args:
            rows: the cells.
            right: numbers of the columns that are flush right.
            fitted: cut the widest other columns to the terminal's width, with a note.
        """
        if not rows:
            return
        rows = [[visible(cell) for cell in row] for row in rows]
        whole = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        widths = _narrowed(whole, self.width, right) if fitted and self.width else whole
        for row in rows:
            cells = [
                cell.rjust(width) if number in right else _cut(cell, width).ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.line(("  " + "  ".join(cells)).rstrip())
        if widths != whole:
            self.line(f"cut to {self.width} characters; --json shows all")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _narrowed(widths: Sequence[int], room: int, right: Sequence[int]) -> list[int]:
    """Return widths whose sum fits, if possible: the widest, but those flush right, are as wide as the next ones."""
    narrow = [*widths]
    for most in range(max(widths), _NARROWEST - 1, -1):
        narrow = [width if at in right else min(width, most) for at, width in enumerate(widths)]
        if sum(narrow) + 2 * len(narrow) <= room:
            break
    return narrow


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"


def _json_value(value: Any) -> Any:
    """Return ``value`` with times, and numbers that JSON lacks (nan, infinities, complex ones), as strings.

    The field ``nbytes`` of a result is ``bytes``, and ``parts`` that it lacks are left out.
    """
    if is_dataclass(value) and not isinstance(value, type):
        named = {"bytes" if item.name == "nbytes" else item.name: getattr(value, item.name) for item in fields(value)}
        value = {name: item for name, item in named.items() if name != "parts" or item}
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, complex | dt.timedelta) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value.isoformat() if isinstance(value, dt.date | dt.time) else value


def format_bytes(count: float) -> str:
    """Return a size in binary units, e.g. ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_number(value: float | None) -> str:
    """Return a number with at most four significant digits after grouping, ``"unknown"`` for None."""
    if value is None:
        return "unknown"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def format_range(value: dict[str, Any] | None) -> str:
    """Return ``{"min", "mean", "max"}`` in words; empty for None."""
    if value is None:
        return ""
    low, high = format_number(value["min"]), format_number(value["max"])
    if low == high:
        return low
    text = f"{low} to {high}"
    return text + f", mean {format_number(value['mean'])}" if "mean" in value else text


class ProgressBar:
    """A progress bar on a terminal; elsewhere a number of lines, by default none.

    Call it with (done, total) to update it. Leaving the context erases it.

    Args:
        label: name of the work.
        stream: to write to.
        lines: lines in all if the stream is no terminal, evenly spread over the steps.
    """

    _INTERVAL = 0.1  # seconds between two drawings
    _WIDTH = 30

    def __init__(self, label: str, stream: TextIO, lines: int = 0) -> None:
        self._label = label
        self._stream = stream
        self._shown = stream.isatty()
        self._lines, self._line = lines, 0
        self._drawn = 0.0
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Erase the bar; the next call draws it again."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show ``done`` of ``total`` steps."""
        if not self._shown and total and (line := done * self._lines // total) > self._line:
            self._line = line
            self._stream.write(f"{self._label} {done:,}/{total:,}  {note}".rstrip() + "\n")
            self._stream.flush()
        now = time.monotonic()
        if not self._shown or (now - self._drawn < self._INTERVAL and done < total):
            return
        self._drawn = now
        share = done / total if total else 1.0
        bar = "#" * round(share * self._WIDTH)
        left = f"{(now - self._begun) * (total - done) / done:.0f} s left" if done else ""
        parts = [f"\r\x1b[K{self._label} [{bar:<{self._WIDTH}}] {done:,}/{total:,}", left, note]
        self._stream.write("  ".join(part for part in parts if part))
        self._stream.flush()
