"""``trajstore export``: export rollouts as JSON lines or Parquet."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from trajstore.cli.command import FORMATS, Command, add_target
from trajstore.cli.output import Output, ProgressBar
from trajstore.errors import trajectories


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint or run directory; path or URL")
    parser.add_argument("target", metavar="OUT", help="file (jsonl) or folder (parquet) to write; must be absent")
    parser.add_argument("--to", choices=("jsonl", "parquet"), default="jsonl", help="default: %(default)s")
    parser.add_argument("--where", metavar="CONDITION", help='only matching trajectories, e.g. "outcome > 0"')
    parser.add_argument("--pin", metavar="NAME", help="export the trajectories of a pin")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from trajstore.operations.export import export_rollouts

    with ProgressBar("exporting", sys.stderr) as bar:
        done = export_rollouts(
            options.path, options.target, options.to, where=options.where, pin=options.pin, progress=bar
        )
    if options.json:
        out.json(done.to_json())
        return int(bool(done.problems or done.damage))
    above = f"{options.path}: "
    out.problems([f"{above}trajectory {name} was left out: {why}" for name, why in done.problems.items()], above)
    if done.steps:
        have = trajectories(done.steps, "of steps was left out; it has", "of steps were left out; they have")
        out.line(f"{options.path}: {have} neither messages nor tokens")
    out.line(f"{done.target}: {done.rollouts:,} rollout{'s' * (done.rollouts != 1)}")
    return int(bool(done.problems or done.damage))


def _configure_import(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILES", help="file of JSON lines or Parquet, or folder of Parquet files")
    add_target(parser, "OUT", "folder of the store; must be absent")
    parser.add_argument("--format", choices=FORMATS, default="pt", help="default: %(default)s")


def _import(options: Namespace, out: Output) -> int:
    from trajstore.operations.importing import import_rollouts

    count = import_rollouts(options.source, options.target, options.format)
    if options.json:
        out.json({"target": options.target, "rollouts": count})
    else:
        out.line(f"{options.target}: {count:,} rollout{'s' * (count != 1)}")
    return 0


IMPORT = Command(
    name="import",
    summary="make a store of exported rollouts",
    description=(
        "Make a store of an export: rollouts with their dtypes and latest late values. Ids, UUIDs and "
        "commit times are new; an export has no authors and no former values. The store appears when it is complete. "
        "Parquet needs Polars (extra 'query')."
    ),
    configure=_configure_import,
    run=_import,
)

COMMAND = Command(
    name="export",
    summary="write rollouts as JSON lines or Parquet",
    description=(
        "Write rollouts with messages, tokens, masks and log-probabilities to a file of JSON lines or a folder of "
        "Parquet files, which datasets, pandas, DuckDB and Polars read. The target appears when it is complete. Needs "
        "Polars (extra 'query')."
    ),
    configure=_configure,
    run=_run,
)
