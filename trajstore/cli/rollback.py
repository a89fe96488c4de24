"""``trajstore rollback``: a store as it was at a saved point."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trajstore.cli.command import Command
from trajstore.cli.output import Output, format_bytes

if TYPE_CHECKING:
    from trajstore.operations.points import RolledBack


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, or run directory; path or URL")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="go back to the saved point of this step")
    what.add_argument("--take-back", metavar="NAME", help="show again what a rollback set aside (aside-...)")
    parser.add_argument(
        "--delete", action="store_true", help="with --step: delete what was added since, do not set it aside"
    )
    parser.add_argument("--dry-run", action="store_true", help="change nothing, say what would be changed")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from trajstore.errors import ConfigurationError
    from trajstore.operations.points import roll_back, take_back

    if options.take_back is not None:
        if options.delete:
            raise ConfigurationError("--delete goes with --step: --take-back deletes nothing")
        count = take_back(options.path, options.take_back, dry_run=options.dry_run)
        if options.json:
            said = {"path": options.path, "taken_back": options.take_back, "trajectories": count}
            out.json({**said, "dry_run": options.dry_run})
        else:
            would = "would be" if options.dry_run else "are"
            out.line(f"{options.path}: {count:,} trajectories of {options.take_back} {would} shown again")
        return 0
    done = roll_back(options.path, options.step, aside=not options.delete, dry_run=options.dry_run)
    if options.json:
        out.json({**done.to_json(), "dry_run": options.dry_run})
        return 0
    for one in done.parts or [done]:
        _write(one, options, out)
    return 0


def _write(done: RolledBack, options: Namespace, out: Output) -> None:
    would = "would be" if options.dry_run else "was"
    out.line(f"{done.path}: {would} rolled back to step {done.step}, {done.trajectories:,} trajectories are live then")
    if done.leaving:
        fate = "are deleted" if done.aside is None else f"are set aside as {done.aside}"
        out.line(f"  {done.leaving:,} added since ({format_bytes(done.leaving_bytes)}) {fate}")
    if done.returning:
        out.line(f"  {done.returning:,} evicted since are live again")
    if done.later_steps:
        out.line(f"  saved points of later steps: {', '.join(map(str, done.later_steps))} go with them")


COMMAND = Command(
    name="rollback",
    summary="make a store what it was at a saved point",
    description=(
        "Go back to the saved point of a step, in one commit. What was added since is set aside: it is no longer "
        "shown, inspect lists it, --take-back shows it again. Of a run directory all stores go back, or none. No "
        "writer may be at work."
    ),
    configure=_configure,
    run=_run,
)
