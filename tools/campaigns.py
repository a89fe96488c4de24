"""What campaigns share: command line, result, children that are killed, and an S3 server of their own."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tools.crash.forked import forking

PATIENCE = 120.0
"""Seconds that a child may take to come somewhere, however slow the machine is."""


@dataclass(kw_only=True)
class Result:
    """What a campaign has found so far.

    Attributes:
        problems: what was wrong.
        counts: how often something was done or compared, by what it is called.
        slowest: seconds that the slowest child, or case, took; 0 where nobody looks at it.
    """

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    begun: float = field(default_factory=time.monotonic, repr=False)

    @property
    def seconds(self) -> float:
        """How long the campaign has taken until now."""
        return time.monotonic() - self.begun


R = TypeVar("R", bound=Result)


def counted(result: Result) -> str:
    """Return the counts of a result, one in a line."""
    lines = [f"{count} {what}" for what, count in result.counts.items()]
    return "\n".join(lines + [f"{result.slowest:.1f} s took the slowest"] * bool(result.slowest))


@contextmanager
def at_work(target: Callable[..., object], *args: object) -> Iterator[BaseProcess]:
    """Start a child that calls ``target``; it is killed in the end."""
    child = forking().Process(target=target, args=args, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def wait_for(child: BaseProcess, happened: Callable[[], bool]) -> None:
    """Wait until something has happened, the child has ended, or ``PATIENCE`` has."""
    end = time.monotonic() + PATIENCE
    while not happened() and child.is_alive() and time.monotonic() < end:
        time.sleep(0.005)


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Start an S3 server on the loopback interface, which keeps conditional PUT; yield its storage options."""
    from moto.server import ThreadedMotoServer
    from werkzeug.serving import WSGIRequestHandler

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # keeps connections: making one costs more than most requests
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    finally:
        server.stop()


def command(module: str, said: str | None, seed_of: str) -> argparse.ArgumentParser:
    """Return the parser of a campaign's command line, to which its own options are added.

    Args:
        module: that ``python -m`` runs.
        said: the module's docstring.
        seed_of: what ``--seed`` decides.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=said, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seed_of}")
    parser.add_argument("--folder", type=Path, help="empty folder to work in and leave; a temporary one if not given")
    return parser


def main(parser: argparse.ArgumentParser, campaign: Callable[..., R], summary: Callable[[R], str] = counted) -> int:
    """Run a campaign and say what it found; return 1 if it found problems.

    Args:
        parser: of its command line.
        campaign: works in the folder that it is given, with the options by name; tells ``progress`` how far it is.
        summary: what is said after the problems.
    """
    options = vars(parser.parse_args())
    chosen = options.pop("folder")
    with tempfile.TemporaryDirectory(prefix="trajstore-") as temporary:
        folder = Path(chosen or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        result = campaign(folder, **options, progress=_show)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{summary(result)}\n{len(result.problems)} problems in {result.seconds:.0f} s\n")
    return 1 if result.problems else 0


def _show(result: Result) -> None:
    """Say how far a campaign is: on a terminal in the same line again and again, elsewhere nothing."""
    if sys.stderr.isatty():
        counts = ", ".join(counted(result).splitlines()[:3])
        sys.stderr.write(f"\r{counts}, {len(result.problems)} problems, {result.seconds:.0f} s ")
        sys.stderr.flush()
