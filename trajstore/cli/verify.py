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
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _audit(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trajstore._core.store.run_ids import ALONE
    from trajstore.operations.training import audit_path

    results = audit_path(options.path)
    names = {rank: "" if rank == ALONE else f"rank_{rank}" for rank in results}
    problems = [f"{names[rank]}: {text}".removeprefix(": ") for rank, one in results.items() for text in one.problems]
    if options.json:
        out.json({"ledgers": [{"rank": max(rank, 0)} | asdict(one) for rank, one in results.items()]})
        return int(bool(problems))
    out.problems(problems, f"{options.path}: ")
    for rank, one in results.items():
        _write_audit(out, f"{options.path}/{names[rank]}".rstrip("/"), one)
    return int(bool(problems))


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


AUDIT = Command(
    name="audit",
    summary="check a training ledger, alone or with its store",
    description=(
        "Check that a ledger's steps have no gaps, that no row was sampled by a later policy, that no rollout is fresh "
        "in two steps, and that advantages, ratios, weights and losses are finite. For a store or a run directory with "
        "ledgers (folder 'ledger' of a store), also check that the store has committed every trajectory, and that each "
        "has the task of its group and the policy version of its row. Exit code 0 = consistent, 1 = problems or "
        "damage, 2 = no ledger there."
    ),
    configure=_configure_audit,
    run=_audit,
)
