"""``trajstore replay-step``: rebuild the batch of a recorded training step and compare it with the ledger."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trajstore.cli.command import Command
from trajstore.cli.output import Output, ProgressBar
from trajstore.errors import counted

if TYPE_CHECKING:
    from trainer_hooks.steps import Check


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("store", metavar="RUN", help="store of all rollouts, with its ledger; path or URL")
    parser.add_argument("step", metavar="STEP", type=int, help="number of the step")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trainer_hooks.steps import recompute, step_inputs

    with ProgressBar("reading", sys.stderr) as bar:
        inputs = step_inputs(options.store, options.step, bar)
    report = recompute(inputs)
    if options.json:
        out.json(asdict(report) | {"problems": report.problems})
        return 1 if report.problems else 0
    out.problems(report.problems, f"{options.store}: ")
    out.line(
        f"{options.store}: step {report.step}, {counted(report.rows, 'row')} in {counted(report.groups, 'group')}, "
        f"{report.replayed:,} of them replayed"
    )
    out.table([(check.name, _shown(check)) for check in report.checks])
    return 1 if report.problems else 0


def _shown(check: Check) -> str:
    if check.left_out:
        return f"left out: {check.left_out}"
    state = "differs" if check.problems else check.found
    largest = f", largest difference {check.difference:.3g}" if check.difference else ""
    return f"{state}, {counted(check.values, 'value')}{largest}"


COMMAND = Command(
    name="replay-step",
    summary="rebuild the batch of a training step and compare it",
    description=(
        "Rebuild the batch of a recorded training step from the store of all rollouts and its ledger, and compare "
        "rollouts, masks, rewards, advantages, weights and importance ratios with the ledger. "
        "Exit code 0 = equal, 1 = a difference or damage, 2 = no such step, or rollouts are not stored."
    ),
    configure=_configure,
    run=_run,
)
