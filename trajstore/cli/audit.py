"""``trajstore audit``: check training ledgers, alone or with their stores, or compare two."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.errors import StoreNotFoundError, counted, trajectories

if TYPE_CHECKING:
    from trajstore.ledger import Audit
    from trajstore.operations.training import Comparison


def _configure(parser: ArgumentParser) -> None:
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


def _run(options: Namespace, out: Output) -> int:
    from dataclasses import asdict

    from trajstore._core.store.run_ids import ALONE
    from trajstore.ledger import audit, read
    from trajstore.operations.training import audit_store, difference_of

    compared = None
    if options.against is not None:
        compared = difference_of(options.path, options.against, options.tolerance)
    difference = compared and compared.difference
    try:
        alone = audit(read(options.path, strict=False), options.max_age)
        results = {}
    except StoreNotFoundError:
        results = audit_store(options.path, options.max_age)
    problems = [
        f"{'' if rank == ALONE else f'rank_{rank}: '}{text}" for rank, one in results.items() for text in one.problems
    ] or [*(() if results else alone.problems)]
    if options.json:
        found = {} if compared is None else asdict(compared)
        stores = {"stores": [{"rank": max(rank, 0)} | asdict(one) for rank, one in results.items()]}
        out.json((stores if results else asdict(alone)) | found)
        return 1 if problems or difference else 0
    out.problems(problems, f"{options.path}: ")
    if not results:
        _write(out, options.path, alone)
    for rank, one in results.items():
        where = options.path if rank == ALONE else f"{options.path}/rank_{rank}"
        _write(out, where, one.ledger)
        drawn = "" if one.only_drawn is None else f"; {counted(one.only_drawn, 'draw')} of the pool not trained"
        out.line(
            f"{where}: each trajectory trained in at most {counted(one.most, 'step')}; {trajectories(one.untrained)} "
            f"of the store not trained, {one.gone:,} trained ones evicted since{drawn}"
        )
    if compared is not None:
        _write_difference(out, options.against, compared, options.tolerance)
    return 1 if problems or difference else 0


def _write(out: Output, where: str, result: Audit) -> None:
    several = f" to {result.last}" if result.steps > 1 else ""
    steps = "" if result.first is None else f" ({result.first}{several})"
    out.line(
        f"{where}: {counted(result.steps, 'step')}{steps}, {counted(result.rows, 'row')}, {result.replayed:,} of them "
        f"replayed; {counted(result.replaced, 'step')} replaced after resuming"
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


COMMAND = Command(
    name="audit",
    summary="check a training ledger, alone or with its store, or compare two runs",
    description=(
        "Check that a ledger's steps have no gaps, that no row was sampled by a later policy, that no rollout is fresh "
        "in two steps, and that advantages, ratios, weights and losses are finite. For a store or a run directory with "
        "ledgers (folder 'ledger' of a store), also check that the store has committed every trajectory, that each has "
        "the task of its group and the policy version of its row, and that a pool has drawn it as often as steps "
        "replayed it (needs Polars, extra 'query'). With --against, show the first step and row in which two runs "
        "differ. Exit code 0 = consistent (and equal), 1 = problems, a difference or damage, 2 = no ledger there."
    ),
    configure=_configure,
    run=_run,
)
