"""``trajstore restore``: create a store from its mirror."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trajstore.cli.command import Command
from trajstore.cli.output import Output, ProgressBar, format_bytes
from trajstore.errors import trajectories

if TYPE_CHECKING:
    from trajstore.remote.mirror.restoring import Restored


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("mirror", metavar="MIRROR", help="mirror, or the folder of a run's mirrors; path or URL")
    parser.add_argument(
        "target", metavar="DIR", help="target folder: absent, empty, or an interrupted restore of MIRROR"
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def _run(options: Namespace, out: Output) -> int:
    from trajstore.remote.mirror.restoring import restore

    with ProgressBar("restoring", sys.stderr) as bar:
        restored = restore(options.mirror, options.target, bar)
    if options.json:
        out.json(restored.to_json())
        return 0
    for store in restored.parts or [restored]:
        _write(store, out)
    return 0


def _write(restored: Restored, out: Output) -> None:
    size, copied = format_bytes(restored.nbytes), format_bytes(restored.copied)
    newest = f", up to id {restored.newest_id:,}" if restored.newest_id >= 0 else ""
    out.line(f"{restored.target}: {trajectories(restored.trajectories)}{newest}; {size}, of which {copied} copied now")
    out.line(f"  new ids begin at {restored.next_id:,}: the lost machine may have given out those between")


COMMAND = Command(
    name="restore",
    summary="make a store of its mirror, after a machine is lost",
    description=(
        "Copy everything that a mirror has (trajectories with their ids, pins, saved points) to a new directory, and "
        "compare every checksum. The result is a store that continues from the mirror's state, and may be mirrored "
        "there again. Run an interrupted restore again to continue it. For a run, each rank_* is restored."
    ),
    configure=_configure,
    run=_run,
    continues=True,
)
