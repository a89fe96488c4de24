"""``trajstore prune`` and ``trajstore compact``: evict trajectories by a condition, remove dead rows."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from trajstore.cli.command import REMOVE, Command
from trajstore.cli.output import Output, format_bytes
from trajstore.errors import listed, trajectories


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
    continues=True,
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
    continues=True,
)
