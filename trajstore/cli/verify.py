"""``trajstore verify`` and ``audit``: check directories and training ledgers; the exit code is the result."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trajstore.cli.command import Command, add_ranks
from trajstore.cli.output import Output, ProgressBar, format_bytes
from trajstore.errors import counted, trajectories

if TYPE_CHECKING:
    from trajstore.ledger import Audit
    from trajstore.operations.training import Comparison
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
    kept = f" ({result.pinned:,} of them evicted or set aside, kept by pins)" if result.pinned else ""
    files = f"{counted(result.files, 'file')}, {format_bytes(result.nbytes)}"
    out.line(f"{result.path}: {result.verdict}: {trajectories(result.trajectories)}{kept}, {files} checked")


VERIFY = Command(
    name="verify",
    summary="check every checksum and every name",
    description=(
        "Read every byte and compare it with its checksum; check that every named file exists. It counts the "
        "files of shards and of saved points' states, and the trajectories with evicted ones that pins keep. A "
        "writer may be running: its evictions are not damage. Writes nothing but a reader's lease while a writer has "
        "the store open. Exit code 0 = sound, 1 = damaged, INCOMPLETE (a rank is missing, all others are sound) or "
        "with too many ranks, 2 = no store there."
    ),
    configure=_configure,
    run=_run,
)

# -- audit --------------------------------------------------------------------------------------------


def _configure_audit(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="ledger, store with a ledger, or run directory; path or URL")
    parser.add_argument("--against", metavar="OTHER", help="show the first step and row that differ from this ledger")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=1e-5,
        help="largest difference of equal floats, relative above 1 (default 1e-5); 0 = compare bit by bit",
    )
    parser.add_argument("--max-age", metavar="N", type=int, help="highest age of a row, in policy versions")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _audit(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trajstore._core.store.run_ids import ALONE
    from trajstore.operations.training import audit_path, difference_of

    compared = None
    if options.against is not None:
        compared = difference_of(options.path, options.against, options.tolerance)
    results = audit_path(options.path, options.max_age)
    names = {rank: "" if rank == ALONE else f"rank_{rank}" for rank in results}
    problems = [f"{names[rank]}: {text}".removeprefix(": ") for rank, one in results.items() for text in one.problems]
    code = 1 if problems or (compared is not None and compared.difference is not None) else 0
    if options.json:
        ledgers = [{"rank": max(rank, 0)} | asdict(one) for rank, one in results.items()]
        out.json({"ledgers": ledgers} | ({} if compared is None else asdict(compared)))
        return code
    out.problems(problems, f"{options.path}: ")
    for rank, one in results.items():
        _write_audit(out, f"{options.path}/{names[rank]}".rstrip("/"), one)
    if compared is not None:
        _write_difference(out, options.against, compared, options.tolerance)
    return code


def _write_audit(out: Output, where: str, result: Audit) -> None:
    several = f" to {result.last}" if result.steps > 1 else ""
    steps = "" if result.first is None else f" ({result.first}{several})"
    out.line(
        f"{where}: {counted(result.steps, 'step')}{steps}, {counted(result.rows, 'row')}, {result.replayed:,} of them "
        f"replayed; {counted(result.replaced, 'step')} replaced after resuming"
    )
    if result.most is not None and result.untrained is not None:
        out.line(
            f"{where}: each trajectory trained in at most {counted(result.most, 'step')}; "
            f"{trajectories(result.untrained)} of the store not trained, {result.gone:,} trained ones evicted since"
        )


def _write_difference(out: Output, other: str, compared: Comparison, tolerance: float) -> None:
    from trajstore._core.store.run_ids import shown_id

    difference = compared.difference
    if difference is None:
        within = f"floats within {tolerance:g}" if tolerance else "bit by bit"
        unknown = f"; not recorded: {', '.join(compared.unknown)}" if compared.unknown else ""
        out.line(f"{other}: equal in every step and row, {within}{unknown}")
    config = [f"  {name}: {mine!r} here, {its!r} there" for name, (mine, its) in compared.config.items()]
    if config:
        out.line(f"{other}: {counted(len(config), 'option', 'differs', 'differ')} in the configuration")
    for line in config:
        out.line(line)
    if difference is None:
        return
    place = f"step {difference.step}" + ("" if difference.row is None else f", row {difference.row}")
    out.line(f"{other}: differs first in {place}")
    if difference.absent is not None:
        out.line(f"  {'the first' if difference.absent == 'this' else 'the other'} ledger lacks this step")
    fields = {name: f"  {name}: {mine!r} here, {its!r} there" for name, (mine, its) in difference.fields.items()}
    columns = {}
    for name, column in difference.columns.items():
        task = "" if column.task is None else f" of {column.task!r}"
        there = "" if column.other == column.trajectory else f" (there {shown_id(column.other)})"
        first = f"first {column.row}: trajectory {shown_id(column.trajectory)}{there}{task}"
        shown = {"tokens": "trained tokens", "token_digest": "tokens", "mask_digest": "mask"}.get(name, name)
        columns[name] = (
            f"  {shown} ({counted(column.rows, 'row')}, {first}): {column.here!r} here, {column.there!r} there"
        )
    losses = {name: fields.pop(name) for name in [*fields] if name.startswith("loss.")}
    for line in (*fields.values(), *columns.values(), *losses.values()):
        out.line(line)


AUDIT = Command(
    name="audit",
    summary="check a training ledger, alone or with its store, or compare two runs",
    description=(
        "Check that a ledger's steps have no gaps, that no row was sampled by a later policy, that no rollout is fresh "
        "in two steps, and that advantages, ratios, weights and losses are finite. For a store or a run directory with "
        "ledgers (folder 'ledger' of a store), also check that the store has committed every trajectory, and that each "
        "has the task of its group and the policy version of its row. With --against, show the first step and row in "
        "which two runs differ. Exit code 0 = consistent (and equal), 1 = problems, a difference or damage, 2 = no "
        "ledger there."
    ),
    configure=_configure_audit,
    run=_audit,
)
