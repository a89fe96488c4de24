"""``trajstore rollback``: roll a store back to a snapshot."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trajstore.cli.command import Command
from trajstore.cli.output import Output, format_bytes
from trajstore.errors import trajectories

if TYPE_CHECKING:
    from trajstore._core.store.rollback import SnapshotChanges


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, or run directory; path or URL")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--step", type=int, metavar="N", help="go to the saved point of this step on the current line")
    target.add_argument("--to", metavar="NAME", help="go to this snapshot: a pin, a saved point, aside-...")
    parser.add_argument(
        "--delete", action="store_true", help="delete the state that is left, instead of giving it a name (aside-...)"
    )
    parser.add_argument("--dry-run", action="store_true", help="change nothing; list the changes")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from trajstore._core.buffer.saved_points import points_at

    name, points = options.step if options.to is None else options.to, points_at(options.path)
    changes = points.changes(name, aside=not options.delete)
    if not options.dry_run:
        points.go_to(name, aside=not options.delete)
    if options.json:
        out.json({**_json(options.path, changes), "dry_run": options.dry_run})
        return 0
    for change in changes:
        _write(change, options, out)
    return 0


def _json(path: str, changes: Sequence[SnapshotChanges]) -> dict[str, Any]:
    """Return the changes of a store, or of the stores of a run with their sums."""
    if len(changes) == 1:
        return changes[0].to_json()
    names = ("trajectories", "leaving", "leaving_bytes", "returning", "values", "values_back")
    sums = {name: sum(getattr(change, name) for change in changes) for name in names}
    parts = [change.to_json() for change in changes]
    return {"path": path, "to": changes[0].to, **sums, "aside": None, "left": None, "later_steps": [], "parts": parts}


def _write(done: SnapshotChanges, options: Namespace, out: Output) -> None:
    would = "would go" if options.dry_run else "went"
    to = f"step {done.to}" if isinstance(done.to, int) else done.to
    out.line(f"{done.path}: {would} to {to}, {trajectories(done.trajectories, 'is', 'are')} live then")
    if done.leaving:
        be = "is" if done.leaving == 1 else "are"
        fate = f" and {be} deleted" if options.delete else ""
        leaving = f"{trajectories(done.leaving)} ({format_bytes(done.leaving_bytes)})"
        out.line(f"  {leaving} {be} no longer live{fate}")
    if done.returning:
        out.line(f"  {trajectories(done.returning, 'is', 'are')} live again")
    if done.values or done.values_back:
        out.line(f"  late values that do not count any more: {done.values:,}; that count again: {done.values_back:,}")
    if done.later_steps:
        out.line(f"  saved points not on its line: {', '.join(map(str, done.later_steps))}")
    if done.left is not None:
        undo = f"`trajstore rollback {done.path} --to {done.left}`"
        would = "is left would be {}: {} would undo this" if options.dry_run else "was left is {}: {} undoes this"
        out.line(f"  the state that {would.format(done.left, undo)}")


COMMAND = Command(
    name="rollback",
    summary="go to a snapshot of a store",
    description=(
        "Return a store to a snapshot (trajectories, late values, saved points), in one commit. The state that is "
        "left becomes a snapshot itself, unless it is one already; going to it undoes the rollback. In a run "
        "directory all stores are rolled back, or none; each names the state that it leaves, so undo it rank by rank. "
        "No writer may have the store open."
    ),
    configure=_configure,
    run=_run,
)
