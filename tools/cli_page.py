"""Generate the command line reference: ``python -m tools.cli_page > docs/cli.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from trajstore.cli import DAMAGED, FAILED, INTERRUPTED, UNREAD, commands

_HEAD = """# Command line

<!-- Written by python -m tools.cli_page; a test fails when it is out of date. -->

`trajstore COMMAND ...`. Results go to standard output, errors (one sentence) and progress bars to standard error;
the bars are silent unless it is a terminal. `trajstore --version` prints the version.
"""


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield every argument as typed, with its help."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        text = (action.help or "") % {"default": action.default, "prog": parser.prog}
        metavar = str(action.metavar or "")
        if action.choices is not None:
            metavar = "{" + ",".join(map(str, action.choices)) + "}"
        names = ", ".join(action.option_strings)
        yield f"{names} {metavar}".strip(), text


def reference() -> str:
    """Return the text of ``docs/cli.md``."""
    lines = [_HEAD]
    for command in commands():
        parser = argparse.ArgumentParser(prog=f"trajstore {command.name}")
        command.configure(parser)
        lines += [
            f"## trajstore {command.name}",
            "",
            command.description,
            "",
            "| argument | meaning |",
            "| --- | --- |",
        ]
        lines += [f"| `{name}` | {text} |" for name, text in options_of(parser)]
        lines.append("")
    lines += [
        "## Exit codes",
        "",
        "| code | meaning |",
        "| --- | --- |",
        "| 0 | done; `verify`: sound |",
        f"| {DAMAGED} | something is damaged, or ranks of a run are missing or too many: `inspect` and `verify` list "
        "it; other commands name the parts that they leave out and process the rest; `copy` copies nothing, and if "
        "nothing can be read, they change nothing |",
        f"| {FAILED} | failed: no store at the path, a value out of range, a package that is not installed, a full "
        "disk |",
        f"| {INTERRUPTED} | interrupted (Ctrl-C; a second one, more than a second later, ends the process at once) |",
        f"| {UNREAD} | the reader of the output, as `head`, closed it before the end |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
