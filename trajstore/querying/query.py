"""A question about trajectories, put together call by call and answered at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.arguments import whole
from trajstore.errors import ConfigurationError, listed
from trajstore.querying.engine import polars

if TYPE_CHECKING:
    from polars import DataFrame, Expr, Series

T = TypeVar("T")

_ORDER = re.compile(r"(?P<what>.+?)(?:\s+(?P<way>asc|desc))?\s*", re.IGNORECASE | re.DOTALL)

_SELECT = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/|\()*(select|with|from)\b", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Query:
    """A question about the facts of trajectories (``trajstore.querying.FACTS``), in expressions of SQL.

    Each method returns a new question; nothing is read before :meth:`ids`, :meth:`table`, :meth:`rows`, :meth:`count`
    or :meth:`sql` asks for the answer, which is of the trajectories shown at that moment.

    Attributes:
        facts: returns the table of facts.
    """

    facts: Callable[[], DataFrame]
    _conditions: tuple[str, ...] = ()
    _columns: tuple[str, ...] = ()
    _groups: tuple[str, ...] = ()
    _order: tuple[str, ...] = ()
    _limit: int | None = None

    def where(self, condition: str) -> Query:
        """Keep the trajectories of which a condition holds: ``"task = 't3' and outcome > 0"``; all that were given."""
        return replace(self, _conditions=(*self._conditions, _text("where", condition)))

    def select(self, *columns: str) -> Query:
        """Return these columns: names, expressions, or of groups aggregates (``"avg(outcome) as mean"``)."""
        return replace(self, _columns=(*self._columns, *(_text("select", one) for one in columns)))

    def group_by(self, *columns: str) -> Query:
        """Make one row of all trajectories that are equal in these; without :meth:`select` it counts them."""
        return replace(self, _groups=(*self._groups, *(_text("group_by", one) for one in columns)))

    def order_by(self, *columns: str) -> Query:
        """Sort by these, each upwards or (``"outcome desc"``) downwards; what is null comes last."""
        return replace(self, _order=(*self._order, *(_text("order_by", one) for one in columns)))

    def limit(self, count: int) -> Query:
        """Return the first ``count`` rows."""
        return replace(self, _limit=whole("limit", count, 0))

    def ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of the trajectories, int64 ``[n]``, for ``get``, ``evict``, ``token_rows``.

        Raises:
            ConfigurationError: an expression is wrong; says where. Or the question groups trajectories.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        if self._groups:
            raise ConfigurationError(
                "ids: the question groups trajectories, so its rows have no ids; ask without group_by"
            )
        ids: npt.NDArray[np.int64] = self._first(self._kept())["trajectory_id"].to_numpy()
        return ids

    def count(self) -> int:
        """Return how many rows the answer has."""
        return len(self.table())

    def rows(self) -> list[dict[str, Any]]:
        """Return the answer as one dict for each row."""
        return self.table().to_dicts()

    def table(self) -> DataFrame:
        """Return the answer as a Polars table, which DuckDB, pandas and datasets read as it is (Arrow's interface).

        Raises:
            ConfigurationError: an expression is wrong; says where.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        kept = self._kept()
        if self._groups:
            groups = [_expression("group_by", one, kept) for one in self._groups]
            columns = [_expression("select", one, kept) for one in self._columns or ("count(*) as count",)]
            grouped = _answered(
                "select", self._columns, kept, lambda: kept.group_by(groups, maintain_order=True).agg(columns)
            )
            return self._first(grouped)
        if not self._columns:
            return self._first(kept)
        ordered = self._sorted(kept)  # all of it: what is selected may be an aggregate
        columns = [_expression("select", one, kept) for one in self._columns]
        return self._limited(_answered("select", self._columns, kept, lambda: ordered.select(columns)))

    def sql(self, text: str) -> DataFrame:
        """Return the answer to a whole statement about the table ``trajectories``: the rows of this question.

        Args:
            text: ``"select task, avg(outcome) as mean from trajectories group by task order by mean"``.

        Raises:
            ConfigurationError: the statement is wrong; says where.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        if not _SELECT.match(_text("sql", text)):
            raise ConfigurationError(f"sql: {text!r}: it must be a SELECT, perhaps after WITH")
        table = self.table()
        context = polars().SQLContext({"trajectories": table})
        result: DataFrame = _answered("sql", (text,), table, lambda: context.execute(text, eager=True))
        return result

    def _kept(self) -> DataFrame:
        """Return the facts of the trajectories of which all conditions hold."""
        table = self.facts()
        for text in self._conditions:
            table = table.filter(_mask(text, table))
        return table

    def _sorted(self, table: DataFrame) -> DataFrame:
        if not self._order:
            return table
        by, down = self._keys(table)
        return _answered(
            "order_by",
            self._order,
            table,
            lambda: table.sort(by, descending=down, nulls_last=True, maintain_order=True),
        )

    def _first(self, table: DataFrame) -> DataFrame:
        """Return the sorted rows up to the limit, without moving the others."""
        if not self._order or self._limit is None:
            return self._limited(self._sorted(table))
        by, down = self._keys(table)
        named = [one.alias(str(at)) for at, one in enumerate(by)]
        keys = _answered("order_by", self._order, table, lambda: table.select(named))
        if len(keys) != len(table):  # no key depends on the row
            return self._limited(self._sorted(table))
        at = polars().arg_sort_by(keys.columns, descending=down, nulls_last=True, maintain_order=True)
        rows = _answered("order_by", self._order, table, lambda: keys.select(at.head(self._limit)).to_series())
        found: DataFrame = table[rows]
        return found

    def _keys(self, table: DataFrame) -> tuple[list[Expr], list[bool]]:
        """Return what rows are sorted by, and which of it downwards."""
        parts = [_ORDER.fullmatch(text) for text in self._order]
        by = [_expression("order_by", part["what"], table) for part in parts if part]
        return by, [(part["way"] or "asc").lower() == "desc" for part in parts if part]

    def _limited(self, table: DataFrame) -> DataFrame:
        return table if self._limit is None else table.head(self._limit)


def _mask(text: str, table: DataFrame) -> Series:
    """Return of which rows a condition holds."""
    pl = polars()
    condition = _expression("where", text, table)
    found: Series = _answered("where", (text,), table, lambda: table.select(condition).to_series())
    if found.dtype not in (pl.Boolean, pl.Null):
        raise ConfigurationError(f"where: {text!r} is {found.dtype}, not true or false for each trajectory")
    if len(found) == len(table):
        mask: Series = found.cast(pl.Boolean)
        return mask
    if condition.meta.root_names():
        raise ConfigurationError(f"where: {text!r} is one value for all trajectories; group_by has aggregates")
    same: Series = pl.Series([found[0]] * len(table), dtype=pl.Boolean)
    return same


def _text(where: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f'{where}: {text!r}, must be an expression of SQL, such as "outcome > 0"')
    return text


def _expression(where: str, text: str, table: DataFrame) -> Expr:
    pl = polars()
    expression: Expr = _answered(where, (text,), table, lambda: pl.sql_expr(text))
    unknown = [name for name in expression.meta.root_names() if name not in table.columns and name != "*"]
    if unknown:
        raise _refusal(where, text, f"there is no fact {unknown[0]!r}", table, unknown[0])
    return expression


def _answered(where: str, texts: Sequence[str], table: DataFrame, call: Callable[[], T]) -> T:
    """Return what Polars returns.

    Raises:
        ConfigurationError: it refuses; says which part of the question, and why.
    """
    pl = polars()
    try:
        return call()
    except pl.exceptions.PolarsError as error:
        reason = str(error).split("\n")[0].strip()
        unknown = re.search(r'column "([^"]*)"', reason) if "valid columns" in reason else None
        raise _refusal(
            where,
            ", ".join(texts),
            f"there is no fact {unknown[1]!r}" if unknown else reason,
            table,
            unknown[1] if unknown else None,
        ) from None


def _refusal(where: str, text: str, reason: str, table: DataFrame, name: str | None) -> ConfigurationError:
    hint = ""
    if name is not None:
        close = get_close_matches(name, table.columns, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {listed(table.columns, 40)}"
    return ConfigurationError(f"{where}: {text!r}: {reason}{hint}")
