"""Split SQL texts into words before Polars reads them: numbers, patterns, lists. Pure."""

from __future__ import annotations

import re
from itertools import zip_longest

from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, listed

QUOTED = r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|--[^\n]*|/\*.*?\*/"""
"""Quoted texts and names, and comments."""

_PARTS = re.compile(QUOTED + r"|(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?|\w+|.", re.DOTALL | re.IGNORECASE)

_MOST_JOINED = 1000
"""Most operators of a text. Polars needs 3 s for them and 20 s for twice as many, and no signal ends it."""

_JOINING = frozenset(("and", "or", "xor", "when", "+", "-", "*", "/", "%", "|"))

_DECIMAL = re.compile(r"\d+\.\d*|\.\d+")


def parts(text: str) -> list[str]:
    """Return words, numbers, quoted texts, comments and single characters; they join to the text."""
    return [match[0] for match in _PARTS.finditer(text)]


def words(text: str) -> list[str]:
    """Return the parts without comments and blanks, in lower case except quoted ones."""
    parts_left = (part for part in parts(text) if not part.isspace() and not part.startswith(("--", "/*")))
    return [part if part[0] in "'\"`$" else part.lower() for part in parts_left]


def split(text: str) -> list[str]:
    """Split at commas outside parentheses: ``"f(a, b), c"`` gives ``["f(a, b)", "c"]``."""
    items, depth = [""], 0
    for part in parts(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(part, 0)
        if part == "," and depth == 0:
            items.append("")
        else:
            items[-1] += part
    return [item.strip() for item in items if item.strip()]


def for_polars(where: str, text: str) -> str:
    """Return a text adapted to Polars: numbers with a point become floats.

    Polars reads ``0.5`` as a decimal: it compares texts with it as texts, and truncates the results of arithmetic.

    Args:
        where: the part of the query, for the message.
        text: an expression or a statement.

    Raises:
        ConfigurationError: a LIKE pattern escapes % or _, which Polars reads as a backslash and the sign; or there are
            too many operators.
    """
    lowered = words(text)
    before = zip(["", *lowered], lowered, strict=False)
    if (joined := sum(word in _JOINING and last not in ("(", ",") for last, word in before)) > _MOST_JOINED:
        raise ConfigurationError(
            f"{where}: {shown(text)}: has {joined:,} operators ({listed(sorted(_JOINING & {*lowered}))}), must have at "
            f"most {_MOST_JOINED:,}; many values of one column are a list: task in ('a', 'b')"
        )
    for word, pattern, then in zip_longest(lowered, lowered[1:], lowered[2:], fillvalue=""):
        if word in ("like", "ilike") and (then == "escape" or re.match(r"'.*\\[%_]", pattern, re.DOTALL)):
            raise ConfigurationError(
                f"{where}: {text!r}: {word} cannot escape % and _; a regular expression finds them: "
                "content ~ '100% done'"
            )
    return "".join(f"{part}e0" if _DECIMAL.fullmatch(part) else part for part in parts(text))
