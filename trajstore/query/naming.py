"""How columns of an answer are called that have no ``as``: as they are written, ``avg(outcome)``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trajstore.query.engine import polars
from trajstore.query.ids import ID
from trajstore.query.words import parts

if TYPE_CHECKING:
    from polars import Expr, LazyFrame

_OF_TABLE = re.compile(r'[^\W\d]\w*\."?\w+"?')
"""A column that is named with its table."""

_ID_ITEM = re.compile(
    r"""(?:(?:min|max|first|last|any_value)\s*\(\s*)?(?:\w+\.)?["`]?trajectory_id["`]?\s*\)?(?:\s+(?:as\s+)?["`]?\w+["`]?)?""",
    re.IGNORECASE,
)
"""An item of a SELECT whose values are ids."""

_ENDS = {"from", "where", "group", "having", "order", "limit", "union", "intersect", "except"}
"""Words that end the list of a SELECT."""


def named(expression: Expr, text: str) -> Expr:
    """Return an expression whose column is called as it is written, unless it is a column itself or has a name."""
    return expression.alias(_written(text)) if _is_nameless(expression, text) else expression


def named_columns(table: LazyFrame, statement: str) -> LazyFrame:
    """Return the answer to a statement, its columns called as :func:`named` calls them.

    Polars calls ``avg(outcome)`` ``outcome``, and ``count(*)`` ``len``. Where columns of the answer are no items of the
    statement one by one (``*``, a statement in parentheses), or two would be called the same, all keep their names.
    """
    items, names = _items(statement), table.collect_schema().names()
    if len(items) != len(names):
        return table
    called = [_called(item) or name for item, name in zip(items, names, strict=True)]
    return table if len(set(called)) < len(called) else table.rename(dict(zip(names, called, strict=True)))


def id_columns(statement: str, names: Sequence[str]) -> set[str]:
    """Return which columns of the answer to a statement are ids."""
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
    """Return how the column of an item is called; None if it is no expression by itself."""
    pl = polars()
    try:
        expression: Expr = pl.sql_expr(item)
    except pl.exceptions.PolarsError:
        return None
    return named(expression, item).meta.output_name(raise_if_undetermined=False)


def _items(statement: str) -> list[str]:
    """Return what the outermost SELECT of a statement lists; nothing where it lies in parentheses."""
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
