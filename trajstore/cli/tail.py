"""``trajstore tail``: follow new commits."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.cli.query import SHOWN, plain, shown_fact

if TYPE_CHECKING:
    from trajstore.operations.tailing import Cursor, News

logger = logging.getLogger(__name__)


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store or run directory; path or URL")
    parser.add_argument(
        "--since", metavar="CURSOR", help="continue after the last trajectory that an earlier call has shown"
    )
    parser.add_argument(
        "--last", metavar="N", type=int, default=10, help="without --since, start with the newest N (default: 10)"
    )
    parser.add_argument("--follow", action="store_true", help="continue until interrupted")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="with --follow, interval between checks (default: 1)",
    )
    parser.add_argument("--where", metavar="CONDITION", help='show only matching trajectories, e.g. "outcome > 0"')
    parser.add_argument("--json", action="store_true", help="write a line of JSON for each, with the cursor after it")


def _run(options: Namespace, out: Output) -> int:
    from trajstore.errors import ConfigurationError, StoreError
    from trajstore.operations.tailing import Cursor, Tail

    if not options.every > 0 or options.last < 0:
        raise ConfigurationError("tail: --every must be above 0, --last at least 0")
    since = None if options.since is None else Cursor.parse(options.since)
    with closing(Tail(options.path, since)) as tail:
        last, trouble, cursor = options.last if since is None else None, "", tail.cursor
        try:
            while True:
                for cursor in _show(tail.news(options.where), options, out, last):  # noqa: B007
                    pass
                cursor, last = tail.cursor, None
                if not options.follow:
                    break
                out.wait(options.every)
                try:
                    tail.refresh()
                    trouble = ""
                except (StoreError, OSError) as error:  # may be temporary: a restarting run
                    if str(error) != trouble:
                        trouble = str(error)
                        logger.warning("%s: %s", options.path, error)
        finally:
            if not options.json:
                out.line(f"continue with: trajstore tail {options.path} --since {cursor}")
    return int(tail.damage is not None)


def _show(news: News, options: Namespace, out: Output, last: int | None) -> Iterator[Cursor]:
    """Write trajectories, or only the ``last`` ones; yield the cursor after each."""
    from trajstore.query.ids import spelled

    for warning in news.warnings:
        logger.warning("%s: %s", options.path, warning)
    skipped = 0 if last is None else max(0, len(news.table) - last)
    table = spelled(news.table.slice(skipped), {"trajectory_id"})
    for row, cursor in zip(table.iter_rows(named=True), news.cursors[skipped:], strict=True):
        if options.json:
            out.json({**{name: plain(value) for name, value in row.items()}, "cursor": str(cursor)}, indent=None)
        else:
            out.line("  ".join(f"{name} {shown_fact(row[name])}" for name in SHOWN if row[name] is not None))
        yield cursor
    out.flush()


COMMAND = Command(
    name="tail",
    summary="show trajectories as they are committed",
    description=(
        "Show the newest trajectories of a store or run directory with their facts, one line each; with --follow, new "
        "ones as they are committed. A cursor marks where to continue later: nothing is shown twice, even after "
        "restarts or with new ranks, and trajectories that were evicted before they could be shown are counted. "
        "Needs Polars (extra 'query')."
    ),
    configure=_configure,
    run=_run,
)
