"""``trajstore export``: export rollouts as JSON lines or Parquet."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from trajstore.cli.command import Command
from trajstore.cli.output import Output, ProgressBar
from trajstore.errors import trajectories


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint or run directory; path or URL")
    parser.add_argument("target", metavar="OUT", help="file (jsonl) or folder (parquet) to make; must be absent")
    parser.add_argument("--to", choices=("jsonl", "parquet"), default="jsonl", help="default: %(default)s")
    parser.add_argument("--where", metavar="CONDITION", help='only those of which it holds, e.g. "outcome > 0"')
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


COMMAND = Command(
    name="export",
    summary="write rollouts as JSON lines or Parquet",
    description=(
        "Write rollouts with messages, tokens, masks and log-probabilities to a file of JSON lines or a folder of "
        "Parquet files, which datasets, pandas, DuckDB and Polars read. The target appears when it is whole. Needs "
        "Polars (extra 'query')."
    ),
    configure=_configure,
    run=_run,
)
