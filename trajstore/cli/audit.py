"""``trajstore audit``: check a training ledger, or compare two."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.errors import counted


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="folder of a ledger; path or URL")
    parser.add_argument("--against", metavar="OTHER", help="show the first step and row that differ from this ledger")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trajstore.ledger import audit, first_difference, read

    ledger = read(options.path)
    result = audit(ledger)
    difference = None if options.against is None else first_difference(ledger, read(options.against))
    if options.json:
        found = {} if options.against is None else {"difference": difference and asdict(difference)}
        out.json(asdict(result) | found)
        return 1 if result.problems or difference else 0
    out.problems(list(result.problems), f"{options.path}: ")
    out.line(
        f"{options.path}: {counted(result.steps, 'step')}, {counted(result.rows, 'row')}, {result.replayed:,} of them "
        f"replayed; {counted(result.replaced, 'step')} replaced after resuming"
    )
    if options.against is not None and difference is None:
        out.line(f"{options.against}: equal in every step and row")
    elif difference is not None:
        place = f"step {difference.step}" + ("" if difference.row is None else f", row {difference.row}")
        out.line(f"{options.against}: differs first in {place}")
        if difference.values is None:
            out.line("  only one of the two ledgers has this step")
        for name, (mine, its) in (difference.values or {}).items():
            out.line(f"  {name}: {mine!r} here, {its!r} there")
    return 1 if result.problems or difference else 0


COMMAND = Command(
    name="audit",
    summary="check a training ledger, or compare two runs",
    description=(
        "Check that a ledger's steps have no gaps, that no row was sampled by a later policy, and that advantages, "
        "ratios, weights and losses are finite. With --against, show the first step and row in which two runs "
        "differ. Exit code 0 = consistent (and equal), 1 = problems, a difference or damage, 2 = no ledger there."
    ),
    configure=_configure,
    run=_run,
)
