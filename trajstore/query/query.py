"""A question about trajectories, put together call by call and answered at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.core.base.arguments import whole
from trajstore.core.store.run_ids import ID_LIMIT
from trajstore.errors import ConfigurationError, listed
from trajstore.query.engine import polars
from trajstore.query.ids import ID, checked_ids, with_numbers
from trajstore.query.naming import named, named_columns
from trajstore.query.relations import RELATIONS, TRAJECTORIES, shown_columns
from trajstore.query.stream import Stream
from trajstore.query.words import for_polars, split, words

if TYPE_CHECKING:
    from polars import DataFrame, Expr, LazyFrame, Series

T = TypeVar("T")

_ORDER = re.compile(r"(?P<what>.+?)(?:\s+(?P<way>asc|desc))?\s*", re.IGNORECASE | re.DOTALL)

_OF_SEVERAL_ROWS = re.compile(
    r'"(Agg|Over|Quantile|Correlation|Explode)":|(?<!"Column":)(?<!"String":)"Len"'  # as Polars writes expressions down
)

_SELECT = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/|\()*(select|with|from)\b", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Query:
    """A question about trajectories, or about what lies in them, in expressions of SQL.

    Its rows are those of a relation: of ``trajectories`` the facts (``trajstore.query.FACTS``); of ``messages``,
    ``tokens`` and ``steps`` what ``trajstore.query.RELATIONS`` says, beside which each fact of the row's trajectory
    can be named.

    Each method returns a new question; nothing is read before :meth:`ids`, :meth:`table`, :meth:`rows`, :meth:`count`
    or :meth:`sql` asks for the answer, which is of the trajectories shown at that moment, or :meth:`stream`, whose rows
    are read while they are taken.

    Attributes:
        facts: returns the table of facts.
        scan: returns rows of a relation, of trajectories with these facts; None where there are none.
        relation: whose rows these are.
    """

    facts: Callable[[], DataFrame]
    scan: Callable[[str, DataFrame], LazyFrame] | None = None
    relation: str = TRAJECTORIES
    _conditions: tuple[str, ...] = ()
    _columns: tuple[str, ...] = ()
    _groups: tuple[str, ...] = ()
    _order: tuple[str, ...] = ()
    _limit: int | None = None

    def where(self, condition: str) -> Query:
        """Keep the rows of which a condition holds: ``"task = 't3' and outcome > 0"``; all that were given."""
        return replace(self, _conditions=(*self._conditions, _text("where", condition)))

    def select(self, *columns: str) -> Query:
        """Return these columns: names, expressions, or of groups aggregates (``"avg(outcome) as mean"``).

        What has no ``as`` is called as it is written: ``avg(outcome)``.
        """
        return replace(self, _columns=(*self._columns, *(_text("select", one) for one in columns)))

    def group_by(self, *columns: str) -> Query:
        """Make one row of all rows that are equal in these; without :meth:`select` it counts them."""
        return replace(self, _groups=(*self._groups, *(_text("group_by", one) for one in columns)))

    def order_by(self, *columns: str) -> Query:
        """Sort by these, each upwards or (``"outcome desc"``) downwards; what is null comes last."""
        return replace(self, _order=(*self._order, *(_text("order_by", one) for one in columns)))

    def limit(self, count: int) -> Query:
        """Return the first ``count`` rows."""
        return replace(self, _limit=whole("limit", count, 0))

    def ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of the rows' trajectories, each once, int64 ``[n]``, for ``get``, ``evict``, ``annotate``.

        Raises:
            ConfigurationError: an expression is wrong; says where. Or the question groups rows.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        if self._groups:
            raise ConfigurationError("ids: the question groups rows, so its rows have no ids; ask without group_by")
        rows = self._limited(self._sorted(self._kept())).select("trajectory_id")
        if self.relation != TRAJECTORIES:
            rows = rows.unique(maintain_order=True)
        ids: npt.NDArray[np.int64] = self._collected(rows)["trajectory_id"].to_numpy()
        return ids

    def count(self) -> int:
        """Return how many rows the answer has."""
        number: int = self._collected(self._plan().select(polars().len())).item()
        return number

    def rows(self) -> list[dict[str, Any]]:
        """Return the answer as one dict for each row."""
        return self.table().to_dicts()

    def table(self) -> DataFrame:
        """Return the answer as a Polars table, which DuckDB, pandas and datasets read as it is (Arrow's interface).

        Raises:
            ConfigurationError: an expression is wrong; says where.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        return self._collected(self._plan())

    def sql(self, text: str) -> DataFrame:
        """Return the answer to a whole statement about the table that is called as the relation: this question's rows.

        A question about trajectories has tables ``messages``, ``tokens`` and ``steps`` besides, of its trajectories.

        Args:
            text: ``"select task, avg(outcome) as mean from trajectories group by task order by mean"``.

        Raises:
            ConfigurationError: the statement is wrong; says where.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        plan = self._statement(text)
        return _answered("sql", (text,), plan, lambda: plan.collect(engine="streaming"))

    def stream(self, text: str | None = None) -> Stream:
        """Return the answer in batches, of which few are in memory: for more rows than that has.

        It is of the trajectories that are shown now, however often and however late it is read.

        Args:
            text: a statement, as for :meth:`sql`; None = the answer that :meth:`table` returns.

        Raises:
            ConfigurationError: an expression or the statement is wrong; says where.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        return Stream(self._plan() if text is None else self._statement(text))

    def _statement(self, text: str) -> LazyFrame:
        if not _SELECT.match(_text("sql", text)):
            raise ConfigurationError(f"sql: {text!r}: it must be a SELECT, perhaps after WITH")
        checked_ids("sql", text, _is_run(self.facts()))
        plan = self._plan(every=True)
        frames = {self.relation: plan}
        if self.relation == TRAJECTORIES and self.scan is not None and not self._groups:
            shown = self._collected(self._limited(self._sorted(self._kept())))
            frames |= {name: self.scan(name, shown) for name in RELATIONS}
        context = polars().SQLContext(frames)
        names = list(dict.fromkeys(name for frame in frames.values() for name in frame.collect_schema().names()))
        statement = for_polars("sql", with_numbers(text))
        try:
            answer = _answered("sql", (text,), names, lambda: _checked(context.execute(statement, eager=False)))
            return named_columns(answer, text)
        except ConfigurationError as error:
            if "relation" not in str(error):
                raise
            raise ConfigurationError(f"{error}; there is {listed(frames)}") from None

    def _plan(self, *, every: bool = False) -> LazyFrame:
        """Return how the answer is made.

        Args:
            every: with all columns where none is chosen, facts besides.
        """
        kept = self._kept()
        if self._groups:
            groups = [self._group(one, kept) for one in self._groups]
            columns = [named(_expression("select", one, kept), one) for one in self._columns or ("count(*)",)]
            twice = {_name_of(one) for one in groups}
            for text, column in zip(self._columns, columns, strict=False):
                if _name_of(column) in twice:
                    raise ConfigurationError(
                        f"select: {text!r}: is in the answer already, as all columns of group_by are"
                    )
            grouped = kept.group_by(groups, maintain_order=True).agg(columns)
            checked = _answered("select", self._columns, kept, lambda: _checked(grouped))
            return self._limited(self._sorted(checked, (*groups, *columns)))
        ordered = self._sorted(kept)  # all of it: what is selected may be an aggregate
        if self._columns:
            chosen = ordered.select([named(_expression("select", one, kept), one) for one in self._columns])
            return self._limited(_answered("select", self._columns, kept, lambda: _checked(chosen)))
        if not every and self.relation != TRAJECTORIES:
            ordered = ordered.select(shown_columns(self.relation))
        return self._limited(ordered)

    def _group(self, text: str, table: LazyFrame) -> Expr:
        """Return what rows are grouped by; a name that only :meth:`select` gives is none yet."""
        if text not in table.collect_schema():
            for one in self._columns:
                if _name_of(_expression("select", one, table)) == text:
                    raise ConfigurationError(
                        f"group_by: {text!r}: select is too late to name it; group_by({one!r}) does"
                    )
        return named(_expression("group_by", text, table), text)

    def _kept(self) -> LazyFrame:
        """Return the rows of which all conditions hold."""
        facts = self.facts()
        for where, texts in (
            ("where", self._conditions),
            ("select", self._columns),
            ("group_by", self._groups),
            ("order_by", self._order),
        ):
            for text in texts:
                checked_ids(where, text, _is_run(facts))
        table = facts.lazy() if self.scan is None or self.relation == TRAJECTORIES else self.scan(self.relation, facts)
        for text in self._conditions:
            table = table.filter(_mask(text, table))
        return table

    def _sorted(self, table: LazyFrame, made_of: Sequence[Expr] = ()) -> LazyFrame:
        """Return the rows in their order.

        Args:
            table: of the rows.
            made_of: what its columns are, of groups: an aggregate is sorted by where it is one of them.
        """
        if not self._order:
            return table
        parts = [_ORDER.fullmatch(text) for text in self._order]
        by = [_key(part["what"], table, made_of) for part in parts if part]
        down = [(part["way"] or "asc").lower() == "desc" for part in parts if part]
        ordered = table.sort(by, descending=down, nulls_last=True, maintain_order=True)
        return _answered("order_by", self._order, table, lambda: _checked(ordered))

    def _limited(self, table: LazyFrame) -> LazyFrame:
        return table if self._limit is None else table.head(self._limit)

    def _collected(self, plan: LazyFrame) -> DataFrame:
        texts = (*self._conditions, *self._groups, *self._columns, *self._order)
        return _answered("query", texts, plan, lambda: plan.collect(engine="streaming"))


def _is_run(facts: DataFrame) -> bool | None:
    """Return whether ids are those of a run; None where there is no trajectory."""
    return bool(facts[ID][0] >= ID_LIMIT) if len(facts) else None


def _name_of(column: Expr) -> str | None:
    return column.meta.output_name(raise_if_undetermined=False)


def _key(text: str, table: LazyFrame, made_of: Sequence[Expr]) -> Expr:
    """Return what rows are sorted by."""
    if made_of and text not in table.collect_schema():
        asked = _answered("order_by", (text,), table, lambda: _parsed("order_by", text)).meta.undo_aliases()
        for one in made_of:
            if one.meta.undo_aliases().meta.eq(asked):
                column: Expr = polars().col(_name_of(one))
                return column
    try:
        key = _expression("order_by", text, table)
    except ConfigurationError as error:
        if not made_of:
            raise
        raise ConfigurationError(f"{error}; groups are sorted by what select has of them") from None
    none = polars().DataFrame(schema=table.collect_schema()).lazy().select(key)
    if len(_answered("order_by", (text,), table, none.collect)):
        raise ConfigurationError(
            f"order_by: {text!r} is one value for all rows; sort by columns, groups by what select has of them"
        )
    return key


def _checked(table: LazyFrame) -> LazyFrame:
    """Return a table whose columns can be named: Polars refuses here what does not fit."""
    table.collect_schema()
    return table


def _mask(text: str, table: LazyFrame) -> Expr:
    """Return of which rows a condition holds."""
    pl = polars()
    condition = _expression("where", text, table)
    if _OF_SEVERAL_ROWS.search(condition.meta.serialize(format="json")):
        raise _not_of_a_row(text)
    none = pl.DataFrame(schema=table.collect_schema())
    as_it_is = pl.QueryOptFlags.none()  # optimizing takes the cube of the number of parts: 20 s of 1,000
    look = none.lazy().select(condition)
    found: Series = _answered("where", (text,), table, lambda: look.collect(optimizations=as_it_is).to_series())
    if found.dtype not in (pl.Boolean, pl.Null):
        raise ConfigurationError(f"where: {text!r} is {found.dtype}, not true or false for each row")
    return condition.cast(pl.Boolean) if found.dtype == pl.Null else condition


def _not_of_a_row(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"where: {text!r}: a condition is about one row, without aggregates, windows and subqueries; sql has them, "
        "with HAVING for groups: select task, count(*) as n from trajectories group by task having count(*) > 300"
    )


def _text(where: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f'{where}: {text!r}, must be an expression of SQL, such as "outcome > 0"')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{where}: {text!r}: is no Unicode: {error}") from error
    return text


def _parsed(where: str, text: str) -> Expr:
    """Return an expression; of one that is not whole the error says what is lacking, which ``sql_expr`` does not."""
    pl = polars()
    if "select" in words(text):
        raise _not_of_a_row(text) if where == "where" else ConfigurationError(f"{where}: {text!r}: sql has subqueries")
    if where != "where" and len(split(text)) > 1:
        raise ConfigurationError(f"{where}: {text!r}: these are several; give each as an argument of its own")
    text = for_polars(where, with_numbers(text))
    try:
        parsed: Expr = pl.sql_expr(text)
    except pl.exceptions.SQLInterfaceError as error:
        if "unable to parse" not in str(error):
            raise
        try:
            pl.SQLContext().execute(f"SELECT {text}")
        except pl.exceptions.SQLInterfaceError as clearer:
            said = re.sub(r"^sql parser error: Expected: | at Line: .*", "", str(clearer)).replace(
                "found: EOF", "found the end"
            )
            raise pl.exceptions.SQLInterfaceError(f"expected {said}") from None
        raise
    return parsed


def _expression(where: str, text: str, table: LazyFrame) -> Expr:
    names = table.collect_schema().names()
    if text in names:  # also one that is called as it was written, "avg(outcome)"
        column: Expr = polars().col(text)
        return column
    expression: Expr = _answered(where, (text,), table, lambda: _parsed(where, text))
    unknown = [name for name in expression.meta.root_names() if name not in names and name != "*"]
    if unknown:
        raise _refusal(where, text, "", names, unknown[0])
    return expression


def _answered(where: str, texts: Sequence[str], names: Sequence[str] | LazyFrame, call: Callable[[], T]) -> T:
    """Return what Polars returns.

    Args:
        where: the part of the question that it is asked for.
        texts: of this part.
        names: of the columns there are, or the table that has them.
        call: asks Polars.

    Raises:
        ConfigurationError: it refuses; says which part of the question, and why.
    """
    pl = polars()
    try:
        return call()
    except pl.exceptions.PolarsError as error:
        reason = str(error).split("\n")[0].strip()
        if "atetime" in reason:
            reason += "; compare times like this: cast(committed as timestamp) > timestamp '2026-01-31 12:00:00'"
        if "string with numeric type" in reason or "check for String values" in reason:
            reason += "; try_cast(NAME as double) makes a number of a text, null where it is none"
        unknown = re.search(r'column "([^"]*)"', reason) if "valid columns" in reason else None
        raise _refusal(where, ", ".join(texts), reason, names, unknown[1] if unknown else None) from None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _refusal(
    where: str, text: str, reason: str, names: Sequence[str] | LazyFrame, unknown: str | None
) -> ConfigurationError:
    if unknown is not None:
        names = names if isinstance(names, Sequence) else names.collect_schema().names()
        close = get_close_matches(unknown, names, 1)
        reason = f"there is no column {unknown!r}; "
        if close:
            reason += f"did you mean {close[0]!r}?"
        elif f'"{unknown}"' in text:
            reason += f"a text takes single quotes: {_quoted(unknown)}"
        else:
            reason += f"there are {listed(names, 40)}"
            if "trajectory_id" in names:
                reason += "; what a rollout's metadata has is none until annotate gives it"
    return ConfigurationError(f"{where}: {text!r}: {reason}")
