"""Name columns without ``as`` by their text in the query, ``avg(outcome)``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trajstore.query.engine import polars
from trajstore.query.ids import ID
from trajstore.query.metadata import with_columns
from trajstore.query.words import parts

if TYPE_CHECKING:
    from polars import Expr, LazyFrame

_OF_TABLE = re.compile(r'[^\W\d]\w*\."?\w+"?')
"""A column qualified by its table."""

_ID_ITEM = re.compile(
    r"""(?:(?:min|max|first|last|any_value)\s*\(\s*)?(?:\w+\.)?["`]?trajectory_id["`]?\s*\)?(?:\s+(?:as\s+)?["`]?\w+["`]?)?""",
    re.IGNORECASE,
)
"""A SELECT item whose values are ids."""

_ENDS = {"from", "where", "group", "having", "order", "limit", "union", "intersect", "except"}
"""Words that end a SELECT list."""


def named(expression: Expr, text: str) -> Expr:
    """Name an expression by its text, unless it is a plain column or has a name."""
    return expression.alias(_written(text)) if _is_nameless(expression, text) else expression


def named_columns(table: LazyFrame, statement: str) -> LazyFrame:
    """Rename the columns of a statement's answer as :func:`named` does.

    Polars names ``avg(outcome)`` ``outcome``, and ``count(*)`` ``len``. All names stay if the columns do not match the
    items of the statement one to one (``*``, a statement in parentheses) or if names would repeat.
    """
    items, names = _items(statement), table.collect_schema().names()
    if len(items) != len(names):
        return table
    called = [_called(item) or name for item, name in zip(items, names, strict=True)]
    return table if len(set(called)) < len(called) else table.rename(dict(zip(names, called, strict=True)))


def id_columns(statement: str, names: Sequence[str]) -> set[str]:
    """Return the names of the id columns in the answer to a statement."""
    items = _items(statement)
    items = items if len(items) == len(names) else [""] * len(names)
    return {name for name, item in zip(names, items, strict=True) if name == ID or _ID_ITEM.fullmatch(item)}


def _written(text: str) -> str:
    return " ".join(text.split())


def _is_nameless(expression: Expr, text: str) -> bool:
    if expression.meta.is_column() or _OF_TABLE.fullmatch(text.strip()):
        return False
    return bool(expression.meta.eq(expression.meta.undo_aliases()))


def _called(item: str) -> str | None:
    """Return the column name of an item; None if it is not an expression by itself."""
    pl = polars()
    try:
        expression: Expr = pl.sql_expr(with_columns(item))
    except pl.exceptions.PolarsError:
        return None
    return named(expression, item).meta.output_name(raise_if_undetermined=False)


def _items(statement: str) -> list[str]:
    """Return the items of a statement's outermost SELECT; empty if it is in parentheses."""
    items, depth, begun = [""], 0, False
    for part in parts(statement):
        word = part.lower()
        if part.startswith(("--", "/*")):
            continue
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(part, 0)
        if not begun:
            begun = depth == 0 and word == "select"
        elif depth == 0 and (word in _ENDS or part == ";"):
            break
        elif depth == 0 and part == ",":
            items.append("")
        elif word not in ("distinct", "all") or items[-1].strip():
            items[-1] += part
    return [item.strip() for item in items] if begun else []
