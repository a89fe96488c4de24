"""The definition of a command."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from trajstore.cli.output import Output

SOURCE = "store, checkpoint, run directory or directory of RLinf; path or URL"
"""Accepted sources of commands that create stores, for help texts."""

REMOVE = "`trajstore.points.points_at(PATH).remove(NAME)` in Python"
"""The call that removes a snapshot of a store without a writer, for messages."""

FORMATS = ("pt", "pkl", "zarr")
"""Names of the shard formats, because importing them loads torch."""

FOREIGN = ("jsonl", "parquet", "chat", "trl", "verl", "dpo", "kto", "lerobot")
"""Names of the formats of other programs, for the same reason."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``trajstore``.

    Attributes:
        name: the word on the command line.
        summary: one line for the list of commands.
        description: the first paragraph of its help.
        configure: adds its arguments to its parser.
        run: runs it and returns the exit code; errors are raised.
    """

    name: str
    summary: str
    description: str
    configure: Callable[[ArgumentParser], object]
    run: Callable[[Namespace, Output], int]


def add_target(parser: ArgumentParser, metavar: str, said: str) -> None:
    """Add the target and output arguments of commands that create stores."""
    parser.add_argument("target", metavar=metavar, help=said)
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def add_ranks(parser: ArgumentParser) -> None:
    """Add the number of ranks to commands that check a run."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="the run has N ranks; another number is a problem (exit code 1); only saved points record it",
    )


def add_tokenizer(parser: ArgumentParser) -> None:
    """Add the tokenizer argument of commands that show tokens."""
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="show tokens as text with this tokenizer (default: the folder that each rollout's metadata names)",
    )
