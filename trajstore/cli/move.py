"""``trajstore merge`` and ``split``: create stores from other stores."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from trajstore.cli.command import SOURCE, Command, add_target
from trajstore.cli.copy import write_copied
from trajstore.cli.output import Output, ProgressBar


def _configure_merge(parser: ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SRC", nargs="+", help=SOURCE)
    _configure_target(parser)


def _configure_split(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=SOURCE)
    _configure_target(parser)
    into = parser.add_mutually_exclusive_group(required=True)
    into.add_argument("--ranks", type=int, metavar="N", help="into a run of N ranks, rank_0 and so on")
    into.add_argument("--count", type=int, metavar="N", help="into part_0 and so on, of N trajectories each")
    into.add_argument(
        "--where", metavar="CONDITION", help="into OUT/matching (the condition holds) and OUT/rest (it does not)"
    )


def _configure_target(parser: ArgumentParser) -> None:
    add_target(parser, "OUT", "target folder: absent, empty, or what this command would write now")


def _merge(options: Namespace, out: Output) -> int:
    from trajstore.operations.moving import merge

    with ProgressBar("verifying", sys.stderr) as bar:
        return write_copied(merge(options.sources, options.target, bar), options, out)


def _split(options: Namespace, out: Output) -> int:
    from trajstore.operations.moving import split

    into = {"ranks": options.ranks, "count": options.count, "where": options.where}
    with ProgressBar("verifying", sys.stderr) as bar:
        return write_copied(split(options.source, options.target, bar, **into), options, out)


LEFT_OUT = (
    "UUIDs stay. Damaged trajectories are left out and named; the exit code is then 1. An interrupted command leaves "
    "nothing "
    "at OUT: run it again."
)

MERGE = Command(
    name="merge",
    summary="make one store of several",
    description=(
        "Write a store of the trajectories of several, in the order of their commits; duplicates are included "
        "once. Files are hard links where the file system allows it. Ids are reassigned, from 0, if trajectories of "
        f"several stores are in the result. {LEFT_OUT}"
    ),
    configure=_configure_merge,
    run=_merge,
    continues=True,
)

SPLIT = Command(
    name="split",
    summary="make several stores of one",
    description=(
        "Write stores of the trajectories of a store or run directory into folders of OUT. Files are hard links "
        f"where the file system allows it. Ids stay; those of a run are reassigned, from 0. {LEFT_OUT}"
    ),
    configure=_configure_split,
    run=_split,
    continues=True,
)
