"""SQL texts before Polars reads them: words, decimals, patterns, keys of metadata, ids; and names of answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import zip_longest

from trajstore._core.columns.limits import shown
from trajstore._core.store.run_ids import ID_LIMIT, RUN_EXAMPLE, SINGLE_EXAMPLE, parsed_id, shown_id
from trajstore.errors import ConfigurationError, listed
from trajstore.query.engine import pl

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


_CLOCKS = {"now": "timestamp", "current_timestamp": "timestamp", "localtimestamp": "timestamp", "current_date": "date"}


def in_utc(text: str, now: datetime) -> str:
    """Return a text with the present time in UTC, as times of facts are; Polars takes the local time.

    Args:
        text: an expression or a statement.
        now: the present time in UTC.
    """
    cells = parts(text)
    for at, word in enumerate(map(str.lower, cells)):
        if (kind := _CLOCKS.get(word)) is None or cells[at - 1 : at] == ["."]:
            continue
        after = [place for place in range(at + 1, len(cells)) if not cells[place].isspace()][:2]
        called = [cells[place] for place in after] == ["(", ")"]
        if word == "now" and not called:  # a column
            continue
        cells[at] = f"{kind} '{now:%Y-%m-%d}'" if kind == "date" else f"{kind} '{now:%Y-%m-%d %H:%M:%S.%f}'"
        for place in after if called else ():
            cells[place] = ""
    return "".join(cells)


# -- keys of metadata --------------------------------------------------------------------------------

METADATA = "metadata"
"""The relation of metadata: one row per rollout, ``json``."""

Path = tuple[str, ...]


def keys_in(texts: Iterable[str]) -> dict[str, Path]:
    """Return the keys of metadata in SQL texts, by the name of their column: ``metadata.tool."exit code"``."""
    return {name: path for text in texts for _, _, name, path in _found(parts(text))}


def with_columns(text: str) -> str:
    """Return a text in which keys of metadata are quoted names of columns, as Polars needs them."""
    cells = parts(text)
    for first, end, name, _ in _found(cells):
        quoted = name.replace('"', '""')
        cells[first:end] = [f'"{quoted}"', *[""] * (end - first - 1)]
    return "".join(cells)


def _found(cells: Sequence[str]) -> list[tuple[int, int, str, Path]]:
    """Return (first cell, end, name of the column, path) of each key."""
    found = []
    for first, cell in enumerate(cells):
        end, path, name = first + 1, list[str](), METADATA
        while cell == METADATA and cells[end : end + 1] == ["."] and end + 1 < len(cells):
            key = cells[end + 1]
            if key[0] in '"`':
                key = key[1:-1].replace(key[0] * 2, key[0])
            elif not key.isidentifier():
                break
            path.append(key)
            name += f".{key}" if key.isidentifier() else f'."{key}"'
            end += 2
        if path and cells[end : end + 1] == ["["]:
            raise ConfigurationError(
                f"{name}[...]: lists in metadata have no columns; the table 'calls' has a row for each object in "
                "metadata.calls, DuckDB reads the others from 'json'"
            )
        if path:
            found.append((first, end, name, tuple(path)))
    return found


# -- ids ---------------------------------------------------------------------------------------------

ID = "trajectory_id"


def with_numbers(where: str, text: str, run: bool | None = None) -> str:
    """Return a text in which quoted ids compared with ``trajectory_id`` are replaced by numbers.

    Args:
        where: the part of the query, for the message.
        text: the expression or statement.
        run: whether ids are those of a run; None if unknown.

    Raises:
        ConfigurationError: an id is none of a run, or of a single store.
    """
    cells = parts(text)
    places = [at for at, cell in enumerate(cells) if not cell.isspace() and not cell.startswith(("--", "/*"))]
    lowered = words(text)
    compared = [at for name, word in enumerate(lowered) if word.strip('"`') == ID for at in _compared(lowered, name)]
    for at in compared:
        value = "".join(lowered[at : at + 1])
        if not value.isdigit() and not value.startswith("'"):  # a column or an expression
            continue
        number = parsed_id(value.strip("'"))
        is_number = value.isdigit() and "/" not in lowered[at - 1 : at + 2]
        is_known = number is not None and (is_number or "/" in value) and run in (None, number >= ID_LIMIT)
        if not is_known:
            of = f"a run directory, whose ids are rank and id in quotes: {ID} = '{RUN_EXAMPLE}'"
            of = f"a single store, whose ids are numbers: {ID} = {SINGLE_EXAMPLE}" if run is False else of
            raise ConfigurationError(f"{where}: {text!r}: {value} is no id of {of}")
        cells[places[at]] = str(number)
    return "".join(cells)


def _compared(lowered: Sequence[str], name: int) -> Iterator[int]:
    """Yield the places of what is compared with the name at a place: by an operator, ``in`` or ``between``."""
    after, before = name + 1, name - 1
    while lowered[before] == "." and before > 0:  # the name of its table
        before -= 2
    if before > 0 and lowered[before] in _COMPARING:
        yield before - (2 if lowered[before - 1] in _COMPARING else 1)
    rest = [*lowered, "", "", "", ""]
    after += rest[after] == "not"
    if rest[after] in _COMPARING:
        yield after + (2 if rest[after + 1] in _COMPARING else 1)
    elif rest[after] == "between":
        yield from (after + 1, after + 3)
    elif rest[after : after + 2] == ["in", "("]:
        end = rest.index(")", after) if ")" in rest[after:] else len(lowered)
        yield from (at for at in range(after + 2, end) if rest[at - 1] in "(,")


_COMPARING = frozenset("=<>!")


def spelled(table: pl.DataFrame, names: set[str]) -> pl.DataFrame:
    """Return a table for output, in which run ids are texts.

    Args:
        table: facts or an answer.
        names: names of the id columns.
    """
    for name in names:
        column = table[name]
        if column.dtype.is_integer() and bool((column >= ID_LIMIT).any()):
            known = column.drop_nulls().unique()
            texts = [shown_id(number) for number in known.to_list()]
            table = table.with_columns(column.replace_strict(known.to_list(), texts, default=None))
    return table


# -- names -------------------------------------------------------------------------------------------

_OF_TABLE = re.compile(r'[^\W\d]\w*\."?\w+"?')
"""A column qualified by its table."""

_ID_ITEM = re.compile(
    r"""(?:(?:min|max|first|last|any_value)\s*\(\s*)?(?:\w+\.)?["`]?trajectory_id["`]?\s*\)?(?:\s+(?:as\s+)?["`]?\w+["`]?)?""",
    re.IGNORECASE,
)
"""A SELECT item whose values are ids."""

_ENDS = {"from", "where", "group", "having", "order", "limit", "union", "intersect", "except"}
"""Words that end a SELECT list."""


def named(expression: pl.Expr, text: str) -> pl.Expr:
    """Name an expression by its text, unless it is a plain column or has a name."""
    return expression.alias(_written(text)) if _is_nameless(expression, text) else expression


def named_columns(table: pl.LazyFrame, statement: str) -> pl.LazyFrame:
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


def _is_nameless(expression: pl.Expr, text: str) -> bool:
    if expression.meta.is_column() or _OF_TABLE.fullmatch(text.strip()):
        return False
    return bool(expression.meta.eq(expression.meta.undo_aliases()))


def _called(item: str) -> str | None:
    """Return the column name of an item; None if it is not an expression by itself."""
    try:
        expression: pl.Expr = pl.sql_expr(with_columns(item))
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
