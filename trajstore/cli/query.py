"""``trajstore list`` and ``trajstore query``: query trajectories and their contents."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trajstore.cli.command import Command
from trajstore.cli.output import Output, shortened
from trajstore.errors import ConfigurationError, StoreError, listed, trajectories

if TYPE_CHECKING:
    from polars import DataFrame

    from trajstore.query import Query

logger = logging.getLogger(__name__)

SHOWN = ("trajectory_id", "task", "outcome", "turns", "steps", "batch", "version_high", "committed")
"""Facts that ``list`` shows by default, except those that are null for all."""


_OWN = "of the rewards' metadata, or a late value"
"""Description of a fact that is not in :data:`FACTS`."""

_METADATA = "metadata.KEY", "a value of the rollout's metadata, nested ones too: metadata.tool.error"

_SORT = "committed desc, trajectory_id desc"
"""Default order of ``list``."""

_LIMIT = 20
"""Default number of trajectories that ``list`` shows."""

_PAUSE = 1.0
"""Seconds between two checks for new trajectories."""

_WIDTH = 100
"""Maximum number of characters in a table cell; longer cells show the number left out."""


def _configure_query(parser: ArgumentParser) -> None:
    _configure_place(parser)
    parser.add_argument(
        "sql", metavar="SQL", help="statement about 'trajectories', 'messages', 'calls', 'tokens', 'steps' or 'trained'"
    )
    parser.add_argument("--json", action="store_true", help="write the rows as JSON")


def _configure_list(parser: ArgumentParser) -> None:
    _configure_place(parser)
    parser.add_argument("--where", metavar="CONDITION", help='show only matching trajectories, e.g. "outcome > 0"')
    parser.add_argument(
        "--columns", metavar="NAMES", help=f"facts to show, separated by commas (default: {','.join(SHOWN)})"
    )
    parser.add_argument(
        "--sort",
        metavar="NAMES",
        help=f"facts or expressions to sort by, separated by commas; nulls come last (default: {_SORT})",
    )
    parser.add_argument("--limit", metavar="N", type=int, help=f"show N; 0 = all (default: {_LIMIT})")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show the newest N, a line each, then new ones as they are committed, until interrupted",
    )
    parser.add_argument(
        "--facts", action="store_true", help="list the facts of this store and the other columns of 'query', then exit"
    )
    parser.add_argument(
        "--open", action="store_true", help="list the agent sessions that are not rollouts of the store yet, then exit"
    )
    parser.add_argument("--json", action="store_true", help="write the rows as JSON")


def _configure_place(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint, run directory or directory of RLinf")
    parser.add_argument("--pin", metavar="NAME", help="use the trajectories of a pin")


def _query(options: Namespace) -> tuple[Query, Callable[[], int]]:
    """Return a query over the intact part of a directory, and a function that returns the exit code after it."""
    from trajstore.operations.opening import open_readable
    from trajstore.query.reader import Queries

    reader, damage = open_readable(options.path, options.pin, verify_shards=True)
    if not len(reader):
        logger.warning("%s: there are no trajectories", options.path)
    queries = Queries(reader._live.locked, reader._live.directories_by_rank)
    return queries.query("trajectories"), lambda: int(damage is not None or bool(queries.damaged))


def _run_query(options: Namespace, out: Output) -> int:
    from trajstore.query.texts import id_columns

    query, code = _query(options)
    answer = query.sql(options.sql)
    _write(answer, id_columns(options.sql, answer.columns), options, out)
    return code()


def _run_list(options: Namespace, out: Output) -> int:
    given = {"--pin": options.pin, "--sort": options.sort, "--facts": options.facts, "--open": options.open}
    if options.follow and (beside := [name for name, value in given.items() if value not in (None, False)]):
        raise ConfigurationError(
            f"{beside[0]}: has no place beside --follow, which shows trajectories in the order of their commits"
        )
    if options.open:
        if options.where or options.columns or options.facts or options.pin:
            raise ConfigurationError("--open takes no --where, --columns, --facts or --pin")
        return _list_open(options, out)
    if options.facts and (options.where or options.columns or options.json):
        raise ConfigurationError("--facts lists names, as text, and takes no --where, --columns or --json")
    if options.sort is not None and not options.sort.strip():
        raise ConfigurationError("--sort: names no fact")
    if options.follow:
        return _follow(options, out)
    query, code = _query(options)
    if options.facts:
        from trajstore.query import FACTS, RELATIONS
        from trajstore.query.trained import COLUMNS, TRAINED

        names = query.facts().columns
        relations = [*RELATIONS.items(), (TRAINED, COLUMNS)]
        below = [(f"{name}.{column}", meaning) for name, own in relations for column, meaning in own.items()]
        out.table([*((name, FACTS.get(name, _OWN)) for name in names), _METADATA, *below])
        return code()
    from trajstore.query.texts import keys_in, split

    question = query.order_by(*split(_SORT if options.sort is None else options.sort))
    if options.where is not None:
        question = question.where(options.where)
    names = _names(options)
    if keys := keys_in(names):
        question = question.select(*query.facts().columns, *keys)
    found = question.table()
    answer, total = found.head(_limit(options) or len(found)), len(found)
    if options.columns is not None:
        answer = answer.select(*_known(names, answer))
    else:
        answer = answer.select(name for name in SHOWN if name == SHOWN[0] or answer[name].null_count() < len(answer))
    _write(answer, {"trajectory_id"} & {*answer.columns}, options, out)
    if not options.json and len(answer) < total:
        out.line(f"{len(answer):,} of {trajectories(total)}; --limit 0 shows all")
    return code()


def _limit(options: Namespace) -> int:
    from trajstore._core.base.arguments import whole

    return whole("--limit", _LIMIT if options.limit is None else options.limit, 0)


def _follow(options: Namespace, out: Output) -> int:
    """Write the newest trajectories in the order of their commits, a line each, then new ones as they are committed."""
    from dataclasses import replace

    from trajstore.operations.opening import open_readable
    from trajstore.query.engine import pl
    from trajstore.query.texts import keys_in, spelled

    reader, _ = open_readable(options.path)
    with reader:
        question = reader.query().order_by("committed", "trajectory_id")
        question = question if options.where is None else question.where(options.where)
        names, trouble, shown = _names(options), "", pl.Series([], dtype=pl.Int64)
        newest, has_news = _limit(options) or None, True
        while True:
            if has_news:
                table = question.table()
                fresh, shown = table.filter(~pl.col("trajectory_id").is_in(shown.implode())), table["trajectory_id"]
                fresh, newest = fresh if newest is None else fresh.tail(newest), None
                if keys := keys_in(names):  # values in the rollouts themselves
                    of_fresh = replace(reader.query(), facts=fresh.clone)
                    fresh = fresh.hstack(of_fresh.select(*keys).table())
                columns = SHOWN if options.columns is None else _known(names, fresh)
                for row in spelled(fresh, {"trajectory_id"}).iter_rows(named=True):
                    if options.json:
                        out.json(row if options.columns is None else {name: row[name] for name in columns}, indent=None)
                    else:
                        values = (f"{name} {shown_fact(row[name])}" for name in columns if row[name] is not None)
                        out.line("  ".join(values))
                out.flush()
            out.wait(_PAUSE)
            try:
                has_news, trouble = reader.refresh(), ""
            except (StoreError, OSError) as error:  # may be temporary: a restarting run
                has_news = False
                if str(error) != trouble:
                    trouble = str(error)
                    logger.warning("%s: %s", options.path, error)


def _names(options: Namespace) -> list[str]:
    return [name.strip() for name in (options.columns or "").split(",") if name.strip()]


def _list_open(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trajstore._core.reading.places import find_place
    from trajstore._core.sessions.sessions import open_sessions

    place = find_place(options.path)
    stores = [part for part in (place.parts or (place,)) if part.kind == "store"]
    found = [(part, session) for part in stores for session in open_sessions(part.url)]
    if options.json:
        out.json([{"store": part.url, **asdict(session)} for part, session in found])
        return 0
    names = ("task", "rollout", "state", "calls", "gaps", "tokens", "opened", "last call", "process")
    rows = []
    for _, session in found:
        opened, last = (shown_fact(datetime.fromtimestamp(at / 1e6, UTC)) for at in (session.opened, session.last))
        numbers = map(str, (session.calls, session.gaps, session.tokens))
        texts = session.task_id, session.rollout_id, session.state
        rows.append([*(shortened(text, _WIDTH) for text in texts), *numbers, opened, last, session.owner or "ended"])
    out.table([names, *rows], right=(3, 4, 5))
    return 0


def _known(names: list[str], table: DataFrame) -> list[str]:
    unknown = [name for name in names if name not in table.columns]
    if unknown:
        raise ConfigurationError(f"--columns: there is no fact {unknown[0]!r}; there are {listed(table.columns, 40)}")
    if not names or len({*names}) < len(names):
        raise ConfigurationError("--columns: name each fact to be shown once")
    return names


def _write(table: DataFrame, ids: set[str], options: Namespace, out: Output) -> None:
    from trajstore.query.texts import spelled

    numbers = [at for at, kind in enumerate(table.dtypes) if kind.is_numeric()]
    table = spelled(table, ids)
    if options.json:
        out.json(table.to_dicts())
    else:
        rows = ([shortened(shown_fact(value), _WIDTH) for value in row] for row in table.iter_rows())
        out.table([table.columns, *rows], numbers, fitted=True)


def shown_fact(value: Any) -> str:
    """Return a fact as text for a table."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{value:.6g}" if isinstance(value, float) else str(value)


LIST = Command(
    name="list",
    summary="list trajectories and their facts",
    description=(
        "List trajectories of a store, checkpoint, run directory or directory of RLinf with facts such as "
        "task, outcome and policy version, latest commits first. --follow shows them in the order of their commits, a "
        "line each, with those of ranks that join. Needs Polars (extra 'query')."
    ),
    configure=_configure_list,
    run=_run_list,
)

QUERY = Command(
    name="query",
    summary="answer a question in SQL about trajectories, their contents and training",
    description=(
        "Run an SQL statement on the tables 'trajectories' (one row each, with facts as columns), 'messages', "
        "'calls' of models and 'tokens' of rollouts, 'steps' of blocks, and 'trained', the rows of optimizer "
        "steps in the training ledger PATH/ledger. All have the facts of their trajectory (trajstore list PATH "
        "--facts). Unreadable trajectories are named and left out. The table cuts long texts; --json does not. "
        "Needs Polars (extra 'query')."
    ),
    configure=_configure_query,
    run=_run_query,
)
