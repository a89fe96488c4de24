"""``trajstore verify``: check a directory for damage; the exit code is the result."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trajstore.cli.command import Command, add_ranks
from trajstore.cli.output import Output, ProgressBar, format_bytes
from trajstore.errors import counted, trajectories

if TYPE_CHECKING:
    from trajstore.operations.verification import Problem, Verification


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint or run directory; path or URL")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    add_ranks(parser)


def _run(options: Namespace, out: Output) -> int:
    from trajstore.operations.verify import verify

    with ProgressBar("checking", sys.stderr) as bar:
        result = verify(options.path, bar, ranks=options.ranks)
    if options.json:
        out.json(result.to_json())
    else:
        _write(result, out)
    return 0 if result.sound else 1


def _said(path: str, problem: Problem) -> str:
    from trajstore._core.store.lost_records import lost_in_words

    above = "" if path in problem.message else f"{'/'.join(filter(None, (path, problem.file)))}: "
    lost = lost_in_words(problem.lost, problem.uncounted)
    return f"{above}{problem.message}" + (f"; lost: {lost}" if lost else "")


def _write(result: Verification, out: Output) -> None:
    for part in result.parts:
        _write(part, out)
    of_parts = sum(len(part.problems) for part in result.parts)
    problems = result.problems[: len(result.problems) - of_parts]
    out.problems([_said(result.path, problem) for problem in problems], f"{result.path}: ")
    for note in result.notes:
        out.line(f"{result.path}: note: {note}")
    verdict = "sound" if result.sound else "DAMAGED"
    kept = f" ({result.pinned:,} of them evicted or set aside, kept by pins)" if result.pinned else ""
    files = f"{counted(result.files, 'file')}, {format_bytes(result.nbytes)}"
    out.line(f"{result.path}: {verdict}: {trajectories(result.trajectories)}{kept}, {files} checked")


COMMAND = Command(
    name="verify",
    summary="check every checksum and every name",
    description=(
        "Read every byte and compare it with its checksum; check that every named file exists. It counts the "
        "files of shards and of saved points' states, and the trajectories with evicted ones that pins keep. A "
        "writer may be running: its evictions are not damage. Writes nothing but a reader's lease while a writer has "
        "the "
        "store open. Exit code 0 = sound, 1 = damaged, 2 = no store there."
    ),
    configure=_configure,
    run=_run,
)
