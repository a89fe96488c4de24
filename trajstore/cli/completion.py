"""``trajstore completion``: completion of commands, options and choices in a shell."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.errors import MissingDependencyError


def configure(parser: ArgumentParser) -> None:
    """Add the argument."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def run(options: Namespace, out: Output) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise MissingDependencyError("shtab", "completion") from error
    from trajstore.cli import build_parser

    for line in shtab.complete(build_parser(), options.shell).splitlines():
        out.line(line)
    return 0


COMMAND = Command(
    "completion",
    "print a script that completes this command line in a shell",
    "Print a script that completes commands, options and choices in a shell. For bash: trajstore completion bash >"
    " ~/.local/share/bash-completion/completions/trajstore. Needs shtab (extra 'completion').",
    configure,
    run,
)
