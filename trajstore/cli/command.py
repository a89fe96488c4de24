"""What a command is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from trajstore.cli.output import Output


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
