"""The command line: ``trajstore inspect``, ``verify``, ``copy``, ``repair``, ``restore``, ``rollback`` and others.

Commands are thin files over functions that can be called directly. Commands import their dependencies when they
run, so that ``trajstore --help`` loads neither torch nor numpy.

Exit codes: 0 = done, 1 = damage was found, 2 = failed (invalid call, no store at the path, full disk, missing package),
130 = interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, cast

from trajstore.cli import annotate, convert, copy, inspect, mend, query, verify, view
from trajstore.cli.command import Command
from trajstore.cli.output import Output, visible
from trajstore.errors import CorruptStoreError, TrajstoreError

DAMAGED = 1
FAILED = 2
INTERRUPTED = 130
UNREAD = 141
"""As of a process that SIGPIPE ends."""


_BUILT_IN: tuple[Command, ...] = (
    inspect.COMMAND,
    query.LIST,
    query.QUERY,
    annotate.COMMAND,
    view.COMMAND,
    verify.VERIFY,
    verify.AUDIT,
    copy.COPY,
    copy.REPAIR,
    copy.RESTORE,
    mend.ROLLBACK,
    mend.PRUNE,
    mend.COMPACT,
    convert.COMMAND,
)


def commands() -> tuple[Command, ...]:
    """Return this package's commands, then those registered under ``trajstore.commands``, by name.

    An entry point names a command or a tuple of commands. One that cannot be imported is named on stderr and left out.
    """
    others = sorted(entry_points(group="trajstore.commands"), key=lambda point: point.name)
    return (*_BUILT_IN, *(command for point in others for command in _loaded(point)))


def _loaded(point: EntryPoint) -> tuple[Command, ...]:
    try:
        loaded = cast("Command | tuple[Command, ...]", point.load())
        return loaded if isinstance(loaded, tuple) else (loaded,)
    except Exception as error:  # the import runs another package's code
        reason = f"{point.value} cannot be imported: {type(error).__name__}: {error}"
        _fail(f"the command {point.name!r} is left out, because {reason}", FAILED)
        return ()


class _Once(argparse.Action):
    """Stores a value, as argparse does by default, and refuses a second one for the same option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given: set[str] = vars(namespace).setdefault("_given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; ``docs/cli.md`` is checked against it."""
    parser = argparse.ArgumentParser(
        prog="trajstore", description="Look into, check and try out stores of reinforcement learning trajectories."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=None, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands():
        child = subparsers.add_parser(command.name, help=command.summary, description=command.description)
        child.register("action", None, _Once)
        command.configure(child)
        child.set_defaults(run=command.run, parser=child)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the words after ``trajstore``; None: those of the process.
    """
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return _fail("standard output is closed", FAILED)
    out = Output(sys.stdout)
    code = UNREAD
    try:
        parser = build_parser()
        options, unknown = parser.parse_known_args(arguments)
        if unknown:  # with the usage of the command, which lists its options
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if options.version:
            out.line(version("trajstore"))
            return 0
        if options.run is None:
            parser.error("a command is needed; see `trajstore --help`")
        code = int(options.run(options, out))
        out.flush()
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output (head, less) has closed it. Keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except CorruptStoreError as error:
        return _fail(str(error), DAMAGED)
    except (TrajstoreError, OSError) as error:
        return _fail(str(error), FAILED)
    return code


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"trajstore: {visible(' '.join(message.split()))}\n")
    return code
