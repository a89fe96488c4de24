"""``trajstore copy``, ``repair`` and ``restore``: make stores of stores and mirrors."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from trajstore.cli.command import SOURCE, Command, add_target
from trajstore.cli.output import Output, ProgressBar, format_bytes
from trajstore.errors import trajectories

if TYPE_CHECKING:
    from trajstore.operations.copying import Copied
    from trajstore.remote.mirror.restoring import Restored
_TARGET = "target folder: absent, empty, or what this command would write now"


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=SOURCE)
    add_target(parser, "DST", _TARGET)


def _run(options: Namespace, out: Output, *, repair: bool = False) -> int:
    """Copy a store, or its intact part; return 1 if anything was lost."""
    from trajstore.operations.copying import copy_store, repair_store

    with ProgressBar("verifying", sys.stderr) as bar:
        copied = (repair_store if repair else copy_store)(options.source, options.target, bar)
    return write_copied(copied, options, out)


def write_copied(copied: Copied, options: Namespace, out: Output) -> int:
    """Write the result; return 1 if any part of the sources was lost or left out."""
    if options.json:
        out.json(copied)
    else:
        _write(copied, out)
    return int(not copied.is_whole)


def _write(copied: Copied, out: Output, *, above: str | None = None) -> None:
    for part in copied.parts:
        _write(part, out, above=copied.target)
    out.problems([f"{copied.source}: {text}" for text in copied.problems], f"{copied.source}: ")
    for note in copied.notes:
        out.line(f"{copied.source}: note: {note}")
    if lost := copied.lost_in_words:
        out.line(f"{copied.source}: lost: {lost}")
    if copied.target != above:
        size = format_bytes(copied.nbytes)
        out.line(f"{copied.target}: {trajectories(copied.trajectories)}, {size}, verified")


COPY = Command(
    name="copy",
    summary="copy a store as it is at this moment, also while it is being written",
    description=(
        "Copy every committed trajectory of a store, a checkpoint, or each store of a run directory, with its id, and "
        "verify the copy. A writer may be running. Files are hard links where the file system allows it. Saved points, "
        "pins, training ledgers and open sessions are not copied; notes name them. A directory of RLinf becomes a "
        "store."
    ),
    configure=_configure,
    run=_run,
)

REPAIR = Command(
    name="repair",
    summary="copy the intact part of a damaged store to a new one",
    description=(
        "Compare every checksum, and write a new store of all trajectories that can be read, with their ids; list "
        "the losses. An empty store replaces a lost rank. A directory of RLinf becomes a store. Damaged "
        "files are neither changed nor deleted. Exit code 0: all trajectories are in the new store; 1: some are "
        "lost, or may be."
    ),
    configure=_configure,
    run=partial(_run, repair=True),
)

# -- restore ------------------------------------------------------------------------------------------


def _configure_restore(parser: ArgumentParser) -> None:
    parser.add_argument("mirror", metavar="MIRROR", help="mirror, or the folder of a run's mirrors; path or URL")
    parser.add_argument(
        "target", metavar="DIR", help="target folder: absent, empty, or an interrupted restore of MIRROR"
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _restore(options: Namespace, out: Output) -> int:
    from trajstore.remote.mirror.restoring import restore

    with ProgressBar("restoring", sys.stderr) as bar:
        restored = restore(options.mirror, options.target, bar)
    if options.json:
        out.json(restored.to_json())
        return 0
    for store in restored.parts or [restored]:
        _write_restored(store, out)
    return 0


def _write_restored(restored: Restored, out: Output) -> None:
    size, copied = format_bytes(restored.nbytes), format_bytes(restored.copied)
    newest = f", up to id {restored.newest_id:,}" if restored.newest_id >= 0 else ""
    out.line(f"{restored.target}: {trajectories(restored.trajectories)}{newest}; {size}, of which {copied} copied now")
    out.line(f"  new ids begin at {restored.next_id:,}: the lost machine may have given out those between")


RESTORE = Command(
    name="restore",
    summary="make a store of its mirror, after a machine is lost",
    description=(
        "Copy everything that a mirror has (trajectories with their ids, pins, saved points) to a new directory, and "
        "compare every checksum. The result is a store that continues from the mirror's state, and may be mirrored "
        "there again. Run an interrupted restore again to continue it. For a run, each rank_* is restored."
    ),
    configure=_configure_restore,
    run=_restore,
)
