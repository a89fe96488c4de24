"""For the built reference: what docstrings have of another markup becomes Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`(?:~(?:\w+\.)*|(?:[a-z_]+\.)*)([^`]+)`")
_TABLE = re.compile(r"^(=+(?: +=+)+\n)(?:.*\n)+?\1(?:(?:.+\n)+\1)?", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return a docstring with ``:meth:`name``` as code, and with tables of reStructuredText as they stand."""
    text = _ROLE.sub(lambda match: f"`{match[1]}`", text)
    return _TABLE.sub(lambda match: _as_block(match[0], match[1]), text + "\n")


def _as_block(table: str, border: str) -> str:
    """Return a table as a block of code, its columns where they were without the marks of code."""
    starts = [match.start() for match in re.finditer("=+", border)]
    lines = []
    for line in table.splitlines():
        cells = [line[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
        lines.append("    " + "".join(cell.replace("``", "").ljust(len(cell)) for cell in cells).rstrip())
    return "\n".join(lines) + "\n"


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
