"""``trajstore demo``: train a small task from a store, and inspect the store."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from trainer_hooks.demo import DEFAULT_TASK, SAMPLERS, TASKS, DemoSettings, load_task
from trajstore.cli.command import Command
from trajstore.cli.inspect import write_report
from trajstore.cli.output import Output, ProgressBar


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--task", choices=sorted(TASKS), default=DEFAULT_TASK, help="what to train (default: %(default)s)"
    )
    parser.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        help="directory of the run; an interrupted run continues (default: trajstore-demo/TASK)",
    )
    parser.add_argument("--updates", type=_at_least_one, metavar="N", help="end after N gradient steps")
    parser.add_argument("--seconds", type=float, metavar="S", help="end after S seconds")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of everything drawn (default: %(default)s)"
    )
    parser.add_argument("--sampler", choices=sorted(SAMPLERS), help="sampler of cartpole (default: uniform)")


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _run(options: Namespace, out: Output) -> int:
    from trajstore.operations.inspect import inspect

    path = options.path or Path("trajstore-demo") / options.task
    settings = DemoSettings(
        path=path, updates=options.updates, seconds=options.seconds, seed=options.seed, sampler=options.sampler
    )
    with ProgressBar("training", sys.stderr, lines=60) as bar:

        def say(text: str) -> None:
            bar.wipe()
            out.line(text)
            out.flush()

        say(f"task {options.task}; trajectories and learner are kept in {path}")
        store = load_task(options.task)(settings, say, bar)
    write_report(inspect(store), out)
    return 0


COMMAND = Command(
    name="demo",
    summary="train a small task from a store and show what was stored",
    description=(
        "Train a small task whose rollouts go through a store on disk, then show what is in the store. "
        "It may be stopped at any time; run it again with the same --path to continue."
    ),
    configure=_configure,
    run=_run,
)
