"""The command lines of campaigns: a seed, a folder to work in, then problems, a summary and the exit code."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar


class Found(Protocol):
    """What a campaign found."""

    problems: list[str]


R = TypeVar("R", bound=Found)


def command(module: str, said: str | None, seed_of: str) -> argparse.ArgumentParser:
    """Return the parser of a campaign's command line, to which its own options are added.

    Args:
        module: that ``python -m`` runs.
        said: the module's docstring.
        seed_of: what ``--seed`` decides.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=said)
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seed_of} (default: 0)")
    parser.add_argument("--folder", type=Path, help="empty folder to work in and leave (default: a temporary one)")
    return parser


def run(options: argparse.Namespace, campaign: Callable[[Path], R], summary: Callable[[R], str]) -> int:
    """Run a campaign and say what it found; return 1 if it found problems.

    Args:
        options: of the command line.
        campaign: works in the folder that it is given.
        summary: what is said after the problems.
    """
    with tempfile.TemporaryDirectory(prefix="trajstore-") as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        result = campaign(folder)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{summary(result)}, {len(result.problems)} problems\n")
    return 1 if result.problems else 0


def show(progress: str) -> None:
    """Say how far a campaign is: on a terminal in the same line again and again, elsewhere nothing."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{progress} ")
        sys.stderr.flush()
