"""Queries over trajectories, built call by call and lazily evaluated; their answers as tables or streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore._core.base.arguments import whole
from trajstore._core.store.run_ids import ID_LIMIT
from trajstore.errors import ConfigurationError, UnknownColumnError, listed
from trajstore.query.documents import with_metadata
from trajstore.query.engine import pl
from trajstore.query.relations import RELATIONS, TRAJECTORIES, and_parts, shown_columns
from trajstore.query.texts import (
    ID,
    for_polars,
    in_utc,
    keys_in,
    named,
    named_columns,
    split,
    with_columns,
    with_numbers,
    words,
)
from trajstore.query.trained import COLUMNS, TRAINED

T = TypeVar("T")

_ORDER = re.compile(r"(?P<what>.+?)(?:\s+(?P<way>asc|desc))?\s*", re.IGNORECASE | re.DOTALL)

_OF_SEVERAL_ROWS = re.compile(
    r'"(Agg|Over|Quantile|Correlation|Explode)":|(?<!"Column":)(?<!"String":)"Len"'  # as Polars writes expressions down
)

_SELECT = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/|\()*(select|with|from)\b", re.IGNORECASE | re.DOTALL)

_DUCKDB = """DuckDB reads it: rows = reader.query(TABLE).stream(); duckdb.sql("select json->>'$.KEY' from rows")"""
"""Remedy for questions about keys of JSON."""

_ROWS = 8192
"""Rows per batch."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A lazily read answer: iterate for Polars tables, or pass it to another tool.

    Readers of Arrow's PyCapsule protocol (DuckDB, pandas, pyarrow, Polars) accept it directly. It covers the
    trajectories visible when it was created, and can be read any number of times. Trajectories evicted by then are left
    out, and a warning names them.
    """

    _plan: pl.LazyFrame

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield the rows in tables; an empty answer yields one empty table with its columns."""
        has_rows = False
        for table in self._batches():
            has_rows = True
            yield table
        if not has_rows:
            yield pl.DataFrame(schema=self._plan.collect_schema())

    def __arrow_c_schema__(self) -> object:
        """Return the columns as an Arrow capsule."""
        return self._plan.collect_schema().__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the rows, from the first, as an Arrow capsule."""
        return self._batches().__arrow_c_stream__(requested_schema)

    def _batches(self) -> Any:
        return self._plan.collect_batches(chunk_size=_ROWS, lazy=True, engine="streaming")


@dataclass(frozen=True, slots=True)
class Query:
    """A query over trajectories or their contents, with SQL expressions.

    Its rows are those of a relation. ``trajectories`` has the facts (``trajstore.query.FACTS``). ``messages``,
    ``calls``, ``tokens`` and ``steps`` have the columns in ``trajstore.query.RELATIONS``, and each fact of the row's
    trajectory can be named too, and values of its metadata: ``metadata.KEY``, null where it has none. ``trained`` has
    the rows of optimizer steps (``trajstore.query.trained.COLUMNS``); facts are null for rows whose trajectory the
    store lacks.

    Each method returns a new query. :meth:`ids`, :meth:`table`, :meth:`rows`, :meth:`count` and :meth:`sql` evaluate it
    over the trajectories visible at that moment; :meth:`stream` reads its rows while they are consumed.

    Attributes:
        facts: returns the table of facts.
        scan: returns rows of a relation for trajectories with these facts; None if only facts can be queried.
        relation: the relation of the rows.
        trained: returns the rows of the training ledgers; None if there can be none.
    """

    facts: Callable[[], pl.DataFrame]
    scan: Callable[[str, pl.DataFrame], pl.LazyFrame] | None = None
    relation: str = TRAJECTORIES
    trained: Callable[[], pl.DataFrame] | None = None
    _conditions: tuple[str, ...] = ()
    _columns: tuple[str, ...] = ()
    _groups: tuple[str, ...] = ()
    _order: tuple[str, ...] = ()
    _limit: int | None = None
    _texts: tuple[str, ...] = ()
    """A statement over the rows, which may name keys of metadata."""
    _reported: set[str] = field(default_factory=set)
    """Keys of metadata of which a warning says that no rollout has them; each is named once."""

    def where(self, condition: str) -> Query:
        """Keep the rows that match a condition, e.g. ``"task = 't3' and outcome > 0"``; conditions are combined."""
        return replace(self, _conditions=(*self._conditions, _text("where", condition)))

    def select(self, *columns: str) -> Query:
        """Select columns: names, expressions, or aggregates of groups (``"avg(outcome) as mean"``).

        A column without ``as`` is named by its text: ``avg(outcome)``.
        """
        return replace(self, _columns=(*self._columns, *(_text("select", column) for column in columns)))

    def group_by(self, *columns: str) -> Query:
        """Group the rows that are equal in these columns; without :meth:`select`, count each group."""
        return replace(self, _groups=(*self._groups, *(_text("group_by", column) for column in columns)))

    def order_by(self, *columns: str) -> Query:
        """Sort by these columns, ascending or (``"outcome desc"``) descending; nulls last."""
        return replace(self, _order=(*self._order, *(_text("order_by", column) for column in columns)))

    def limit(self, count: int) -> Query:
        """Return the first ``count`` rows."""
        return replace(self, _limit=whole("limit", count, 0))

    def ids(self) -> npt.NDArray[np.int64]:
        """Return the distinct ids of the rows' trajectories, int64 ``[n]``, for ``get``, ``evict``, ``annotate``.

        A NumPy array, as ``trajectory_ids`` of a buffer; ``tolist()`` makes plain ints, which JSON needs.

        Raises:
            ConfigurationError: an expression is invalid (with its part of the query), or the query groups rows.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        if self._groups:
            raise ConfigurationError("ids: the query groups rows, so its rows have no ids; leave out group_by")
        rows = self._limited(self._sorted(self._kept())).select("trajectory_id")
        if self.relation == TRAINED:
            rows = rows.drop_nulls()
        if self.relation != TRAJECTORIES:
            rows = rows.unique(maintain_order=True)
        return self._collected(rows)["trajectory_id"].to_numpy()

    def count(self) -> int:
        """Return the number of rows."""
        return int(self._collected(self._plan().select(pl.len())).item())

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return self.table().to_dicts()

    def table(self) -> pl.DataFrame:
        """Return the answer as a Polars table, which DuckDB, pandas and datasets read via Arrow's interface.

        Raises:
            ConfigurationError: an expression is invalid; names its part of the query.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        return self._collected(self._plan())

    def sql(self, text: str) -> pl.DataFrame:
        """Run a whole SQL statement over this query's rows, a table named like the relation.

        A query over trajectories also provides their ``messages``, ``calls``, ``tokens`` and ``steps`` as tables.

        Args:
            text: ``"select task, avg(outcome) as mean from trajectories group by task order by mean"``.

        Raises:
            ConfigurationError: the statement is invalid, with the reason.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        plan = self._statement(text)
        return _answered("sql", (text,), plan, lambda: plan.collect(engine="streaming"))

    def stream(self, text: str | None = None) -> Stream:
        """Return the answer in batches, for results larger than memory.

        It always covers the trajectories visible now, no matter when it is read.

        Args:
            text: a statement, as for :meth:`sql`; None streams the answer of :meth:`table`.

        Raises:
            ConfigurationError: an expression or the statement is invalid; names its part of the query.
            MissingDependencyError: Polars is not installed (extra ``query``).
        """
        return Stream(self._plan() if text is None else self._statement(text))

    def _statement(self, text: str) -> pl.LazyFrame:
        if not _SELECT.match(_text("sql", text)):
            raise ConfigurationError(f"sql: {text!r}: it must be a SELECT, perhaps after WITH")
        with_numbers("sql", text, _is_run(self.facts()))
        keyed = replace(self, _texts=(text,))  # with the keys of metadata that it names
        if self.relation == TRAJECTORIES and self.scan is not None and not self._groups:
            shown = self._collected(self._limited(self._sorted(keyed._kept())))
            frames = {self.relation: keyed._plan(every=True, kept=shown.lazy())}
            if TRAJECTORIES in words(text):  # a join must have these once
                shown = shown.drop(set(keyed._keys()) - set(self.facts().columns))
            frames |= {name: self.scan(name, shown) for name in RELATIONS}
            if self.trained is not None and TRAINED in words(text):
                frames[TRAINED] = self._trained(shown, all_rows=not self._conditions and self._limit is None)
        else:
            frames = {self.relation: keyed._plan(every=True)}
        context = pl.SQLContext(frames)
        named = {word.strip('"`') for word in words(text)}
        asked = [frame for relation, frame in frames.items() if relation in named]
        names = list(dict.fromkeys(name for frame in asked for name in frame.collect_schema().names()))
        statement = for_polars("sql", _prepared("sql", text))
        try:
            answer = _answered("sql", (text,), names, lambda: _checked(context.execute(statement, eager=False)))
            return named_columns(answer, text)
        except ConfigurationError as error:
            if "relation" not in str(error):
                raise
            raise ConfigurationError(f"{error}; there is {listed(frames)}") from None

    def _plan(self, *, every: bool = False, kept: pl.LazyFrame | None = None) -> pl.LazyFrame:
        """Return the plan of the answer.

        Args:
            every: include all columns, also facts, if none are selected.
            kept: the rows that match all conditions, if they are known.
        """
        kept = self._kept() if kept is None else kept
        if self._groups:
            groups = [self._group(expression, kept) for expression in self._groups]
            columns = [
                named(_expression("select", expression, kept), expression)
                for expression in self._columns or ("count(*)",)
            ]
            twice = {_name_of(expression) for expression in groups}
            for text, column in zip(self._columns, columns, strict=False):
                if _name_of(column) in twice:
                    raise ConfigurationError(
                        f"select: {text!r}: is in the result already, like all columns of group_by"
                    )
            grouped = kept.group_by(groups, maintain_order=True).agg(columns)
            checked = _answered("select", self._columns, kept, lambda: _checked(grouped))
            return self._limited(self._sorted(checked, (*groups, *columns)))
        ordered = self._sorted(kept)  # before the selection, which may be an aggregate
        if self._columns:
            chosen = ordered.select(
                [named(_expression("select", expression, kept), expression) for expression in self._columns]
            )
            return self._limited(_answered("select", self._columns, kept, lambda: _checked(chosen)))
        if not every:
            names = kept.collect_schema().names()
            if self.relation == TRAINED:
                names = [ID, "task", *COLUMNS]
            elif self.relation != TRAJECTORIES:
                names = shown_columns(self.relation)
            ordered = ordered.select(name for name in names if name not in self._keys())
        return self._limited(ordered)

    def _group(self, text: str, table: pl.LazyFrame) -> pl.Expr:
        """Return the expression to group by; names defined by :meth:`select` are not available yet."""
        if text not in table.collect_schema():
            for selected in self._columns:
                if _name_of(_expression("select", selected, table)) == text:
                    raise ConfigurationError(
                        f"group_by: {text!r}: select is too late to name it; group_by({selected!r}) does"
                    )
        return named(_expression("group_by", text, table), text)

    def _kept(self) -> pl.LazyFrame:
        """Return the rows that match all conditions."""
        facts = self.facts()
        for where, texts in (
            ("where", self._conditions),
            ("select", self._columns),
            ("group_by", self._groups),
            ("order_by", self._order),
        ):
            for text in texts:
                with_numbers(where, text, _is_run(facts))
        if wanted := {name: path for name, path in self._keys().items() if name not in facts.columns}:
            if self.scan is None:
                raise ConfigurationError(f"{listed(wanted)}: only facts can be queried here")
            facts = with_metadata(facts, wanted, self.scan, self._candidates(facts), self._reported)
        if self.relation == TRAINED:
            table = self._trained(facts, all_rows=True)
        elif self.scan is None or self.relation == TRAJECTORIES:
            table = facts.lazy()
        else:
            table = self.scan(self.relation, facts)
        for text in self._conditions:
            try:
                table = table.filter(_mask(text, table))
            except UnknownColumnError:
                self._refuse_names_of_rows(text, facts)
                raise
        return table

    def _refuse_names_of_rows(self, text: str, facts: pl.DataFrame) -> None:
        """Raise an error if a condition on trajectories names columns of the rows in them."""
        if self.scan is None or self.relation != TRAJECTORIES:
            return
        for relation in RELATIONS:
            columns = set(self.scan(relation, facts.clear()).collect_schema()) - set(facts.columns)
            if names := [word for word in dict.fromkeys(words(text)) if word in columns]:
                raise UnknownColumnError(
                    f"where: {text!r}: {listed(names)}: in the table {relation}, not a fact of trajectories; "
                    f"query({relation!r}).where({text!r}).ids() returns those that have such a row"
                )

    def _trained(self, facts: pl.DataFrame, *, all_rows: bool) -> pl.LazyFrame:
        """Return the trained rows with the facts of their trajectories.

        Args:
            facts: of the trajectories.
            all_rows: include rows of other trajectories, and of none.
        """
        if self.trained is None:
            raise ConfigurationError(f"relation: {TRAINED!r}: there is no training ledger here")
        rows = self.trained().lazy()
        beside = facts.lazy().drop(set(facts.columns) & {"task", *COLUMNS})
        return rows.join(beside, ID, "left" if all_rows else "inner", maintain_order="left")

    def _keys(self) -> dict[str, tuple[str, ...]]:
        """Return the keys of metadata that the query names, by the name of their column."""
        return keys_in((*self._conditions, *self._columns, *self._groups, *self._order, *self._texts))

    def _candidates(self, facts: pl.DataFrame) -> pl.DataFrame:
        """Return the facts that match the conditions on facts alone, so that fewer rollouts are read."""
        known = set(facts.columns) - set(RELATIONS.get(self.relation, ()))
        for text in self._conditions:
            for part in and_parts(_answered("where", (text,), facts.columns, partial(_parsed, "where", text))):
                names = set(part.meta.root_names())
                if names and names <= known and not _OF_SEVERAL_ROWS.search(part.meta.serialize(format="json")):
                    facts = _answered("where", (text,), facts.columns, partial(facts.filter, part))
        return facts

    def _sorted(self, table: pl.LazyFrame, made_of: Sequence[pl.Expr] = ()) -> pl.LazyFrame:
        """Return the sorted rows.

        Args:
            table: the rows.
            made_of: the columns of grouped rows; sorting by an aggregate needs it among them.
        """
        if not self._order:
            return table
        parts = [_ORDER.fullmatch(text) for text in self._order]
        by = [_key(part["what"], table, made_of) for part in parts if part]
        down = [(part["way"] or "asc").lower() == "desc" for part in parts if part]
        ordered = table.sort(by, descending=down, nulls_last=True, maintain_order=True)
        return _answered("order_by", self._order, table, lambda: _checked(ordered))

    def _limited(self, table: pl.LazyFrame) -> pl.LazyFrame:
        return table if self._limit is None else table.head(self._limit)

    def _collected(self, plan: pl.LazyFrame) -> pl.DataFrame:
        texts = (*self._conditions, *self._groups, *self._columns, *self._order)
        return _answered("query", texts, plan, lambda: plan.collect(engine="streaming"))


def _is_run(facts: pl.DataFrame) -> bool | None:
    """Return whether ids are those of a run; None if there are no trajectories."""
    return bool(facts[ID][0] >= ID_LIMIT) if len(facts) else None


def _name_of(column: pl.Expr) -> str | None:
    return column.meta.output_name(raise_if_undetermined=False)


def _key(text: str, table: pl.LazyFrame, made_of: Sequence[pl.Expr]) -> pl.Expr:
    """Return the expression to sort by."""
    if made_of and text not in table.collect_schema():
        asked = _answered("order_by", (text,), table, lambda: _parsed("order_by", text)).meta.undo_aliases()
        for expression in made_of:
            if expression.meta.undo_aliases().meta.eq(asked):
                return pl.col(expression.meta.output_name())
    try:
        key = _expression("order_by", text, table)
    except ConfigurationError as error:
        if not made_of:
            raise
        raise ConfigurationError(f"{error}; groups are sorted by selected columns") from None
    none = pl.DataFrame(schema=table.collect_schema()).lazy().select(key)
    if len(_answered("order_by", (text,), table, none.collect)):
        raise ConfigurationError(
            f"order_by: {text!r} is one value for all rows; sort by columns, or groups by selected columns"
        )
    return key


def _checked(table: pl.LazyFrame) -> pl.LazyFrame:
    """Resolve the columns of a table, so that Polars raises its errors here."""
    table.collect_schema()
    return table


def _mask(text: str, table: pl.LazyFrame) -> pl.Expr:
    """Return a boolean expression for a condition."""
    condition = _expression("where", text, table)
    if _OF_SEVERAL_ROWS.search(condition.meta.serialize(format="json")):
        raise _not_of_a_row(text)
    none = pl.DataFrame(schema=table.collect_schema())
    as_it_is = pl.QueryOptFlags.none()  # optimizing is cubic in the number of parts: 20 s for 1,000
    look = none.lazy().select(condition)
    mask: pl.Series = _answered("where", (text,), table, lambda: look.collect(optimizations=as_it_is).to_series())
    if mask.dtype not in (pl.Boolean, pl.Null):
        raise ConfigurationError(f"where: {text!r} is {mask.dtype}, not true or false for each row")
    return condition.cast(pl.Boolean) if mask.dtype == pl.Null else condition


def _not_of_a_row(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"where: {text!r}: a condition is about one row, without aggregates, windows and subqueries; sql has them, "
        "with HAVING for groups: select task, count(*) as n from trajectories group by task having count(*) > 300"
    )


def _text(where: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f'{where}: {text!r}, must be an SQL expression, such as "outcome > 0"')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{where}: {text!r}: is not valid Unicode: {error}") from error
    return text


def _prepared(where: str, text: str) -> str:
    return with_columns(with_numbers(where, in_utc(text, datetime.now(UTC))))


def _parsed(where: str, text: str) -> pl.Expr:
    if "select" in words(text):
        raise _not_of_a_row(text) if where == "where" else ConfigurationError(f"{where}: {text!r}: sql has subqueries")
    if where != "where" and len(split(text)) > 1:
        raise ConfigurationError(f"{where}: {text!r}: has several expressions; pass each as its own argument")
    text = for_polars(where, _prepared(where, text))
    parsed: pl.Expr = pl.sql_expr(text)
    return parsed


def _expression(where: str, text: str, table: pl.LazyFrame) -> pl.Expr:
    names = table.collect_schema().names()
    if text in names:  # includes columns named by their text, "avg(outcome)"
        return pl.col(text)
    expression: pl.Expr = _answered(where, (text,), table, lambda: _parsed(where, text))
    unknown = [name for name in expression.meta.root_names() if name not in names and name != "*"]
    if unknown:
        raise _refusal(where, text, "", names, unknown[0])
    if where in ("where", "order_by") and not expression.meta.undo_aliases().meta.eq(expression):
        name = expression.meta.output_name()
        raise ConfigurationError(f"{where}: {text!r}: {name!r} at the end has no effect; add an operator, or remove it")
    return expression


def _answered(where: str, texts: Sequence[str], names: Sequence[str] | pl.LazyFrame, call: Callable[[], T]) -> T:
    """Return the result of a call to Polars.

    Args:
        where: the part of the query, for the message.
        texts: the expressions of this part.
        names: the available columns, or the table that has them.
        call: calls Polars.

    Raises:
        ConfigurationError: Polars refuses; names the part of the query and the reason.
    """
    try:
        return call()
    except pl.exceptions.PolarsError as error:
        reason = str(error).split("\n")[0].strip()
        if "atetime" in reason:
            reason += "; compare times like this: cast(committed as timestamp) > timestamp '2026-01-31 12:00:00'"
        if isinstance(error, pl.exceptions.StructFieldNotFoundError) or re.search("'json|json/", reason):
            reason += f": Polars' SQL takes no value out of JSON; {_DUCKDB}"
        if "string with numeric type" in reason or "check for String values" in reason:
            reason += "; try_cast(NAME as double) makes a number of a text, null where it is none"
        unknown = re.search(r"""column "([^"]*)".*valid columns|no column named '([^']*)' found""", reason)
        raise _refusal(where, ", ".join(texts), reason, names, unknown and (unknown[1] or unknown[2])) from None


def _refusal(
    where: str, text: str, reason: str, names: Sequence[str] | pl.LazyFrame, unknown: str | None
) -> ConfigurationError:
    if unknown is not None:
        names = names if isinstance(names, Sequence) else names.collect_schema().names()
        if unknown in names:  # of another table
            return ConfigurationError(f"{where}: {text!r}: {reason}")
        close = get_close_matches(unknown, names, 1)
        reason = f"there is no column {unknown!r}; "
        if close:
            reason += f"did you mean {close[0]!r}? A key of metadata would be metadata.{unknown}"
        elif f'"{unknown}"' in text:
            quoted = unknown.replace("'", "''")
            reason += f"a text takes single quotes: '{quoted}'"
        else:
            if "trajectory_id" in names:
                reason += f"a key of a rollout's metadata would be metadata.{unknown}; "
            reason += f"there are {listed(names, 40)}"
        if "json" in names and f'"{unknown}"' not in text:
            reason += f"; other keys of a message or a call are in its json, and {_DUCKDB}"
    refusal = ConfigurationError if unknown is None else UnknownColumnError
    return refusal(f"{where}: {text!r}: {reason}")
