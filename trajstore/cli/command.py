"""What a command is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from trajstore.cli.output import Output

SOURCE = "store, checkpoint, run directory or directory of RLinf; path or URL"
"""What commands that make new stores take, in words."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``trajstore``.

    Attributes:
        name: the word on the command line.
        summary: one line for the list of commands.
        description: the first paragraph of its help.
        configure: adds its arguments to its parser.
        run: does it and returns the exit code; errors leave it as exceptions.
    """

    name: str
    summary: str
    description: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Output], int]


def add_target(parser: ArgumentParser, metavar: str, said: str) -> None:
    """Let a command that makes stores be told where to, and how to write its result."""
    parser.add_argument("target", metavar=metavar, help=said)
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def add_tokenizer(parser: ArgumentParser) -> None:
    """Let a command that shows tokens be told what makes text of them."""
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="show tokens as text with this tokenizer (default: the folder that each rollout's metadata names)",
    )
