"""``trajstore annotate``: add late scores, corrections and tags."""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.errors import ConfigurationError, TrajstoreError, listed, trajectories

_TOGETHER = 10_000
"""Trajectories per commit."""

_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store or run directory; path or URL")
    parser.add_argument("ids", metavar="ID", nargs="*", help="ids of trajectories, as list shows them (17, 3/17)")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a JSON number (0.5, -3), true or false (1 or 0), or null, which removes the value; "
        "anything else is a text, as is a value in double quotes ('NAME=\"7\"'); malformed numbers (.5, 007) are "
        "refused; may be repeated",
    )
    parser.add_argument(
        "--file", metavar="FILE", help='JSON lines: {"trajectory_id": "3/17", "NAME": VALUE, ...}; - = standard input'
    )
    parser.add_argument("--who", metavar="NAME", help="author of the values, for the history")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from trajstore._core.buffer.annotating import annotate_files

    if bool(options.ids) == bool(options.file) or bool(options.ids) != bool(options.set):
        raise ConfigurationError("annotate: give ids with --set NAME=VALUE, or --file")
    given, new = 0, dict[str, None]()
    if options.ids:
        values = dict(_assignment(item) for item in options.set)
        if len(values) < len(options.set):
            raise ConfigurationError("annotate: --set has a name twice")
        new.update(dict.fromkeys(annotate_files(options.path, options.ids, values, options.who)))
        given = len(options.ids)
    else:
        if options.file == "-" and sys.stdin is None:
            raise ConfigurationError("annotate: --file -: standard input is closed; name a file")
        with nullcontext(sys.stdin) if options.file == "-" else Path(options.file).open(encoding="utf-8") as file:
            try:
                for ids, columns in _portions(file, options.file):
                    new.update(dict.fromkeys(annotate_files(options.path, ids, columns, options.who)))
                    given += len(ids)
            except TrajstoreError:
                done = f"only the first {trajectories(given)}" if given else "none of the trajectories"
                out.line(f"{options.path}: {done} of {options.file} have their values")
                raise
    if options.json:
        out.json({"path": options.path, "trajectories": given, "new_names": [*new]})
    else:
        if new:
            out.line(f"{options.path}: new here: {listed(new)}; `trajstore list PATH --facts` has all names")
        out.line(f"{options.path}: {trajectories(given, 'has its values', 'have their values')}")
    return 0


def _assignment(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals:
        raise ConfigurationError(f"annotate: --set {item}: must be NAME=VALUE")
    _check_number(item, name, value.strip())
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, value if isinstance(parsed, dict | list) else parsed


def _check_number(item: str, name: str, value: str) -> None:
    """Refuse a malformed number, which would become a text, and numbers that a store cannot hold."""
    try:
        number = float(value)
    except ValueError:
        return
    text = f"a text is quoted: --set '{name}=\"{value}\"'"
    if not math.isfinite(number):
        raise ConfigurationError(f"annotate: --set {item}: {value} is not finite; null removes a value, and {text}")
    if not _JSON_NUMBER.fullmatch(value):
        raise ConfigurationError(f"annotate: --set {item}: {value} is not a number in JSON (0.5, -3, 1e-4); {text}")


def _portions(file: TextIO, name: str) -> Iterator[tuple[list[Any], dict[str, list[Any]]]]:
    """Yield ids and values of consecutive lines with the same names."""
    ids: list[Any] = []
    columns: dict[str, list[Any]] = {}
    there: set[Any] = set()
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            values = dict(json.loads(line))
            trajectory_id = values.pop("trajectory_id")
            hash(trajectory_id)
        except (json.JSONDecodeError, TypeError, ValueError, KeyError) as error:
            wanted = 'a JSON object on a line of its own, {"trajectory_id": ..., ...}'
            raise ConfigurationError(f"{name}, line {number}: must be {wanted}") from error
        if ids and (values.keys() != columns.keys() or trajectory_id in there or len(ids) == _TOGETHER):
            yield ids, columns
            ids, columns, there = [], {}, set()
        ids.append(trajectory_id)
        there.add(trajectory_id)
        for key, value in values.items():
            columns.setdefault(key, []).append(value)
    if ids:
        yield ids, columns


COMMAND = Command(
    name="annotate",
    summary="give trajectories scores, corrections and tags that come late",
    description=(
        "Set late values of trajectories: numbers, or texts such as tags. A running writer records them within a "
        "second; without one, this command does. The latest value of a name is a column of list and query; earlier "
        "ones stay in the history."
    ),
    configure=_configure,
    run=_run,
)
