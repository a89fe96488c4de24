"""``trajstore demo``: names the command that replaces it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.errors import ConfigurationError


def _configure(parser: ArgumentParser) -> None:
    del parser


def _run(options: Namespace, out: Output) -> int:
    raise ConfigurationError("the demo is not part of the package; in a checkout, run  python -m examples.demo")


COMMAND = Command(
    name="demo",
    summary="name the demo's command",
    description="The demo is outside the package: python -m examples.demo in a checkout.",
    configure=_configure,
    run=_run,
)
