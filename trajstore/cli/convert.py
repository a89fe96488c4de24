"""``trajstore convert``: stores in another shard format, or files of other programs, and back."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from trajstore.cli.command import FOREIGN, FORMATS, SOURCE, Command, add_target
from trajstore.cli.copy import write_copied
from trajstore.cli.output import Output, ProgressBar
from trajstore.errors import ConfigurationError, counted, listed, trajectories


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=f"{SOURCE}; with --from, a file or folder of that format")
    add_target(parser, "DST", "file or folder to write; must be absent")
    parser.add_argument("--from", dest="origin", choices=FOREIGN, help="format of SRC (default: a store)")
    parser.add_argument(
        "--to", choices=(*FORMATS, *FOREIGN), help="format of DST; pt, pkl and zarr are stores (with --from: pt)"
    )
    parser.add_argument(
        "--store-frames-once",
        action="store_true",
        help="store next_obs that equals curr_obs of the next step once (DST is a store)",
    )
    parser.add_argument("--where", metavar="CONDITION", help='only matching trajectories, e.g. "outcome > 0"')
    parser.add_argument("--pin", metavar="NAME", help="the trajectories of a pin")


def _run(options: Namespace, out: Output) -> int:
    if options.origin is None and options.to is None:
        raise ConfigurationError("convert: give --to, --from or both")
    if options.origin is not None and options.to in FOREIGN:
        raise ConfigurationError(
            f"convert: from {options.origin} to {options.to} takes two steps: make a store with --from, convert it "
            "with --to"
        )
    if options.origin is not None and options.where is not None:
        raise ConfigurationError("convert: --where selects trajectories of a store; SRC is none (--from)")
    if options.to not in FOREIGN and options.pin is not None:
        raise ConfigurationError("convert: --pin selects trajectories for files of other programs (--to)")
    if options.to in FOREIGN and options.store_frames_once:
        raise ConfigurationError("convert: --store-frames-once is for stores (--to pt, pkl or zarr, or --from)")
    if options.origin is None and options.to in FORMATS:
        from trajstore.operations.conversion import convert

        with ProgressBar("verifying", sys.stderr) as bar:
            done = convert(
                options.source,
                options.target,
                options.to,
                bar,
                where=options.where,
                store_frames_once=options.store_frames_once,
            )
        return write_copied(done, options, out)
    return _foreign(options, out)


def _foreign(options: Namespace, out: Output) -> int:
    """Convert to or from files of another program."""
    from trajstore.interop.convert import convert_from, convert_to, format_named

    form = format_named(options.origin or options.to)
    with ProgressBar("converting", sys.stderr) as bar:
        if options.origin is None:
            done = convert_to(
                options.source, options.target, form.name, where=options.where, pin=options.pin, progress=bar
            )
        else:
            done = convert_from(
                options.source,
                options.target,
                form.name,
                trajectory_format=options.to or "pt",
                store_frames_once=options.store_frames_once,
                progress=bar,
            )
    if options.json:
        out.json(done)
        return int(not done.is_whole)
    if lost := form.not_read if options.origin else done.lost:
        place = "a store" if options.origin else form.name
        out.line(f"not converted, because {place} has no place for it: {listed(lost, 99)}")
    out.problems([f"{options.source}: {line}" for line in done.reasons()], f"{options.source}: ")
    if done.left_out:
        kind = "of steps" if form.kind == "rollouts" else "of agents"
        have = trajectories(done.left_out, f"{kind} was left out", f"{kind} were left out")
        out.line(f"{options.source}: {have}; {form.name} has {form.kind}")
    for why, count in done.not_chosen.items():
        out.line(f"{options.source}: left out: {counted(count, 'rollout')} {why}")
    for what, count in done.changed.items():
        out.line(f"{options.source}: {what}: {count:,}")
    out.line(f"{done.target}: {counted(done.written, form.one)}")
    return int(not done.is_whole)


COMMAND = Command(
    name="convert",
    summary="write rollouts and episodes as files of other programs, read such files, or change a store's format",
    description=(
        "Write a store's rollouts or episodes as files of another program (--to), or make a store of such files "
        "(--from). Fields without a place in the format are listed. DST appears when it is complete. The formats jsonl "
        "and parquet keep every field of rollouts, with late values; chat is OpenAI's; trl and verl are Parquet files "
        "for these trainers; dpo pairs the best and the worst rollout of each task and prompt for TRL, and kto labels "
        "each. With --to pt, pkl or zarr, DST is one store, and may also be empty: UUIDs stay, and so do the ids of "
        "one store; those of a run are reassigned, from 0, in the order of the commits. Files are hard links where the "
        "file system allows it. Damaged trajectories are left out and named; the exit code is then 1. An interrupted "
        "command leaves nothing at DST: run it again."
    ),
    configure=_configure,
    run=_run,
)
