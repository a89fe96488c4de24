"""``trajstore replay-step``: rebuild the batch of a recorded training step and recompute it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import TYPE_CHECKING

from trajstore.cli.command import Command
from trajstore.cli.output import Output, ProgressBar
from trajstore.errors import ConfigurationError, counted

if TYPE_CHECKING:
    from trainer_hooks.steps import Check, Policy, StepInputs

POLICIES = {"verl": "trainer_hooks.steps.hugging_face:HuggingFacePolicy"}
"""Class of the policy by the trainer that the ledger's options name."""


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("store", metavar="RUN", help="store of all rollouts, with its ledger; path or URL")
    parser.add_argument("step", metavar="STEP", type=int, help="number of the step")
    parser.add_argument(
        "--checkpoint", metavar="PATH", help="the step before's (verl: with hf_model); recompute log-probs and loss"
    )
    parser.add_argument(
        "--policy",
        metavar="MODULE:CLASS",
        help="class that makes the policy of a checkpoint, called with (path, step, options) (default: by trainer)",
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trainer_hooks.steps import recompute, step_inputs, with_log_probs

    if options.policy is not None and options.checkpoint is None:
        raise ConfigurationError("--policy: has no effect without --checkpoint")
    with ProgressBar("reading", sys.stderr) as bar:
        inputs = step_inputs(options.store, options.step, bar)
    if options.checkpoint is not None:
        policy = _policy(inputs, options.checkpoint, options.policy)
        with ProgressBar("recomputing", sys.stderr) as bar:
            inputs = with_log_probs(inputs, policy, bar)
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


def _policy(inputs: StepInputs, checkpoint: str, name: str | None) -> Policy:
    """Return the policy of a checkpoint, made by the named class or by the one of the step's trainer."""
    described = inputs.step.options.get("policy", {})
    name = name or POLICIES.get(described.get("trainer", ""))
    if name is None:
        raise ConfigurationError(
            f"--checkpoint: step {inputs.step.step} was trained by {described.get('trainer')!r}; name the class of its "
            f"policy with --policy MODULE:CLASS (known without it: {', '.join(POLICIES)}), or leave the option out"
        )
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"--policy {name}: cannot be imported ({error}); write MODULE:CLASS") from error
    made: Policy = kind(checkpoint, inputs.step.step, described)
    return made


def _shown(check: Check) -> str:
    if check.left_out:
        return f"left out: {check.left_out}"
    state = "differs" if check.problems else check.found
    largest = f", largest difference {check.difference:.3g}" if check.difference else ""
    return f"{state}, {counted(check.values, 'value')}{largest}"


COMMAND = Command(
    name="replay-step",
    summary="rebuild the batch of a training step and recompute it",
    description=(
        "Rebuild the batch of a recorded training step from the store of all rollouts and its ledger, and compare "
        "rollouts, masks, rewards, advantages, weights and importance ratios with the ledger. With the checkpoint of "
        "the step before, also recompute log-probs, importance ratios and loss terms. "
        "Exit code 0 = equal, 1 = a difference or damage, 2 = no such step, or rollouts are not stored."
    ),
    configure=_configure,
    run=_run,
)
