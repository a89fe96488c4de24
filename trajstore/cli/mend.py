"""``trajstore prune``, ``compact`` and ``rollback``: change stores that have no writer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trajstore.cli.command import REMOVE, Command
from trajstore.cli.output import Output, format_bytes
from trajstore.errors import listed, trajectories

if TYPE_CHECKING:
    from trajstore._core.store.rollback import SnapshotChanges


def _configure_prune(parser: ArgumentParser) -> None:
    _configure(parser)
    parser.add_argument(
        "--where", metavar="CONDITION", required=True, help='evict matching trajectories, e.g. "outcome = 0"'
    )
    parser.add_argument("--yes", action="store_true", help="evict; without it, nothing is changed")


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store or run directory without a running writer; path or URL")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _configure_compact(parser: ArgumentParser) -> None:
    _configure(parser)
    parser.add_argument("--compress", action="store_true", help="compress all shards with zstd (extra 'zarr')")


def _prune(options: Namespace, out: Output) -> int:
    from trajstore.operations.mending import prune

    pruned = prune(options.path, options.where, dry_run=not options.yes)
    if options.json:
        out.json(pruned)
        return int(pruned.damage is not None)
    if not pruned.trajectories:
        out.line(f"{pruned.path}: nothing to evict: the condition holds for none of {trajectories(pruned.kept)}")
        return int(pruned.damage is not None)
    would = "would be" if not options.yes else "was" if pruned.trajectories == 1 else "were"
    summary = f"{trajectories(pruned.trajectories)} ({format_bytes(pruned.nbytes)} of live bytes) {would} evicted"
    out.line(f"{pruned.path}: {summary}, {pruned.kept:,} stay")
    _write_held(pruned.held_by_points, out)
    if not options.yes:
        out.line("  nothing was changed; --yes does it")
    return int(pruned.damage is not None)


def _compact(options: Namespace, out: Output) -> int:
    from trajstore.operations.mending import compact

    done = compact(options.path, compress=options.compress)
    if options.json:
        out.json(done)
        return int(done.damaged > 0)
    held = ""
    if done.held_bytes:
        held = f"; {format_bytes(done.held_bytes)} are kept for readers: compact again when they have ended"
    before, after = format_bytes(done.bytes_before), format_bytes(done.bytes_after)
    out.line(f"{done.path}: shards had {before}, have {after} now{held}")
    _write_held(done.held_by_points, out)
    return int(done.damaged > 0)


def _write_held(held: dict[str, Any], out: Output) -> None:
    if held["trajectories"]:
        summary = f"{trajectories(held['trajectories'])} ({format_bytes(held['bytes'])} of files)"
        out.line(
            f"  {summary} stay on disk for {listed(held['names'])}, and are shown again by a rollback there, until "
            f"these are removed: {REMOVE}"
        )


PRUNE = Command(
    name="prune",
    summary="evict the trajectories of which a condition holds",
    description=(
        "Evict the trajectories of a store or run directory that match a condition on facts (trajstore list PATH "
        "--facts). Without --yes it only counts them. --yes evicts them, in one commit per store; no writer may be "
        "running then. Pinned trajectories stay readable. Exit code 1: it did so, but part of the store is damaged "
        "(see 'verify'). Needs Polars (extra 'query')."
    ),
    configure=_configure_prune,
    run=_prune,
)

COMPACT = Command(
    name="compact",
    summary="give back the disk space of evicted trajectories, and unite small shards",
    description=(
        "Rewrite the shards of a store, or of each store of a run directory, until no row is dead and no two small "
        "shards are left. No writer may be running. An interrupted command loses nothing: run it again. "
        "Exit code 1: damaged shards stay as they are (see 'verify'); all others were rewritten."
    ),
    configure=_configure_compact,
    run=_compact,
)

# -- rollback -----------------------------------------------------------------------------------------


def _configure_rollback(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, or run directory; path or URL")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--step", type=int, metavar="N", help="go to the saved point of this step on the current line")
    target.add_argument("--to", metavar="NAME", help="go to this snapshot: a pin, a saved point, aside-...")
    parser.add_argument(
        "--delete", action="store_true", help="delete the state that is left, instead of giving it a name (aside-...)"
    )
    parser.add_argument("--dry-run", action="store_true", help="change nothing; list the changes")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _rollback(options: Namespace, out: Output) -> int:
    from trajstore._core.buffer.saved_points import points_at

    name, points = options.step if options.to is None else options.to, points_at(options.path)
    changes = points.changes(name, aside=not options.delete)
    if not options.dry_run:
        points.go_to(name, aside=not options.delete)
    if options.json:
        out.json({**_json(options.path, changes), "dry_run": options.dry_run})
        return 0
    for change in changes:
        _write_changes(change, options, out)
    return 0


def _json(path: str, changes: Sequence[SnapshotChanges]) -> dict[str, Any]:
    """Return the changes of a store, or of the stores of a run with their sums."""
    if len(changes) == 1:
        return changes[0].to_json()
    names = ("trajectories", "leaving", "leaving_bytes", "returning", "values", "values_back")
    sums = {name: sum(getattr(change, name) for change in changes) for name in names}
    parts = [change.to_json() for change in changes]
    return {"path": path, "to": changes[0].to, **sums, "aside": None, "left": None, "later_steps": [], "parts": parts}


def _write_changes(done: SnapshotChanges, options: Namespace, out: Output) -> None:
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


ROLLBACK = Command(
    name="rollback",
    summary="go to a snapshot of a store",
    description=(
        "Return a store to a snapshot (trajectories, late values, saved points), in one commit. The state that is "
        "left becomes a snapshot itself, unless it is one already; going to it undoes the rollback. In a run "
        "directory all stores are rolled back, or none; each names the state that it leaves, so undo it rank by rank. "
        "No writer may have the store open."
    ),
    configure=_configure_rollback,
    run=_rollback,
)
