"""``trajstore view``: show a store in a browser."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import closing
from typing import TYPE_CHECKING

from trajstore.cli.command import Command, add_tokenizer
from trajstore.cli.output import Output, ProgressBar, format_bytes
from trajstore.errors import ConfigurationError, MissingDependencyError, trajectories

if TYPE_CHECKING:
    from trajstore.view.living import Living

_HOST = "127.0.0.1"
_PORT = 8421


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="store, checkpoint, run directory or directory of RLinf")
    parser.add_argument("--pin", metavar="NAME", help="show the trajectories of a pin")
    parser.add_argument("--port", metavar="N", type=int, help=f"port; 0 = any free one (default: {_PORT})")
    parser.add_argument(
        "--host",
        metavar="NAME",
        help=f"address to listen on; other machines need the token that is printed (default: {_HOST})",
    )
    add_tokenizer(parser)
    parser.add_argument(
        "--bundle",
        metavar="DIR",
        help="do not serve; write the page into a folder for any file server: absent, empty or a bundle",
    )
    parser.add_argument(
        "--where", metavar="CONDITION", help='for a bundle: only matching trajectories, e.g. "outcome > 0"'
    )


def _run(options: Namespace, out: Output) -> int:
    serves = options.bundle is None
    why = "without --bundle: the page asks" if serves else "with --bundle: nothing is served"
    for name in ("where",) if serves else ("host", "port"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"view: --{name} has no effect {why}")
    return _serve(options, out) if serves else _bundle(options, out)


def _bundle(options: Namespace, out: Output) -> int:
    from trajstore.view.bundle import write_bundle

    if options.where is not None and not options.where.strip():
        raise ConfigurationError("view: --where is empty; leave it out for all trajectories")
    with closing(_living(options, copied=True)) as living, ProgressBar("writing", sys.stderr) as bar:
        done = write_bundle(living, options.bundle, where=options.where or "", progress=bar)
    if done.trouble is not None:
        out.line(f"{options.path}: {done.trouble}")
    above = f"{options.path}: "
    lines = [f"{above}trajectory {name} cannot be read: {problem}" for name, problem in done.problems.items()]
    out.problems(lines, above, "the page names them")
    out.line(f"{done.target}: {trajectories(done.trajectories)}, {format_bytes(done.bytes)}")
    return int(bool(done.problems or done.trouble))


def _serve(options: Namespace, out: Output) -> int:
    host, port = options.host or _HOST, _PORT if options.port is None else options.port
    try:
        from trajstore.view.server import listening, server_of
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise MissingDependencyError(error.name, "view") from None
    with listening(host, port) as (listener, token, address):

        def announce() -> None:
            out.line(address)
            out.line("Ctrl-C ends it")
            out.flush()

        with closing(_living(options)) as living:
            server_of(living, token, announce).run(sockets=[listener])
    return 0


def _living(options: Namespace, *, copied: bool = False) -> Living:
    from trajstore.view.living import Living

    return Living(options.path, pin=options.pin, copied=copied, tokenizer=options.tokenizer)


COMMAND = Command(
    name="view",
    summary="show a store as a page in a browser, live",
    description=(
        "Show a store, checkpoint, run directory or directory of RLinf as a page in a browser: a "
        "table of trajectories, rollouts as conversations and coloured tokens, groups, curves. New commits "
        "appear on the page; the writer never waits. The store is not written, and nothing is loaded from other "
        "servers. Needs the extra 'view'. With --bundle, a folder to publish is written instead."
    ),
    configure=_configure,
    run=_run,
)
