"""What a text of SQL says, word by word, before Polars reads it: numbers, patterns, what it lists. Pure."""

from __future__ import annotations

import re
from itertools import zip_longest

from trajstore.errors import ConfigurationError

_PARTS = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\$(\w*)\$.*?\$\1\$|--[^\n]*|/\*.*?\*/"""
    r"""|(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?|\w+|.""",
    re.DOTALL | re.IGNORECASE,
)

_DECIMAL = re.compile(r"\d+\.\d*|\.\d+")


def parts(text: str) -> list[str]:
    """Return words, numbers, texts in quotes, comments and single characters; joined they are the text."""
    return [found[0] for found in _PARTS.finditer(text)]


def words(text: str) -> list[str]:
    """Return the parts of a text without comments and blanks, in lower case; what stands in quotes as it is."""
    found = (one for one in parts(text) if not one.isspace() and not one.startswith(("--", "/*")))
    return [one if one[0] in "'\"`$" else one.lower() for one in found]


def split(text: str) -> list[str]:
    """Return what stands between commas that are in no parentheses: of ``"f(a, b), c"`` ``["f(a, b)", "c"]``."""
    items, depth = [""], 0
    for part in parts(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(part, 0)
        if part == "," and depth == 0:
            items.append("")
        else:
            items[-1] += part
    return [item.strip() for item in items if item.strip()]


def for_polars(where: str, text: str) -> str:
    """Return a text as Polars is to read it: its numbers with a point are floats.

    Polars takes ``0.5`` for a decimal: it compares texts with it as texts, and cuts off what arithmetic with it makes.

    Args:
        where: the part of the question that it is.
        text: an expression or a statement.

    Raises:
        ConfigurationError: a pattern of LIKE escapes its signs, which Polars takes for a backslash and the sign.
    """
    said = words(text)
    for word, pattern, then in zip_longest(said, said[1:], said[2:], fillvalue=""):
        if word in ("like", "ilike") and (then == "escape" or re.match(r"'.*\\[%_]", pattern, re.DOTALL)):
            raise ConfigurationError(
                f"{where}: {text!r}: {word} cannot escape % and _; a regular expression finds them: "
                "content ~ '100% done'"
            )
    return "".join(f"{part}e0" if _DECIMAL.fullmatch(part) else part for part in parts(text))
