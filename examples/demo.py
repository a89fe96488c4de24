"""``python -m examples.demo``: train a small task whose rollouts go through a store, and show what was stored."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from examples.cartpole.run import SAMPLERS
from examples.cartpole.run import run as train_cartpole
from examples.common import DemoSettings
from examples.grpo.demo import run as train_with_replay
from trajstore.cli import main as trajstore
from trajstore.cli.output import ProgressBar
from trajstore.errors import CorruptStoreError, TrajstoreError

TASKS = {"replay": train_with_replay, "cartpole": train_cartpole}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m examples.demo",
        description=(
            "Train a small task whose rollouts go through a store on disk, then show what is in the store. "
            "It may be stopped at any time; run it again with the same --path to continue."
        ),
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="replay", help="what to train (default: %(default)s)")
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
    return parser


def _at_least_one(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and show the store; return the exit code, as ``trajstore`` does: 1 = damage, 2 = failed, 130 = Ctrl-C."""
    options = _parser().parse_args(arguments)
    path = options.path or Path("trajstore-demo") / options.task
    settings = DemoSettings(path, options.updates, options.seconds, options.seed, options.sampler)
    try:
        with ProgressBar("training", sys.stderr, lines=60) as bar:

            def say(text: str) -> None:
                bar.wipe()
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

            say(f"task {options.task}; trajectories and learner are kept in {path}")
            store = TASKS[options.task](settings, say, bar)
    except KeyboardInterrupt:
        sys.stderr.write("demo: interrupted\n")
        return 130
    except (TrajstoreError, OSError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1 if isinstance(error, CorruptStoreError) else 2
    return trajstore(["inspect", str(store)])


if __name__ == "__main__":
    sys.exit(main())
