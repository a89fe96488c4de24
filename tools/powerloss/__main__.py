"""``python -m tools.powerloss --states 2000 --seed 0``: exit code 0 if nothing was lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import tools.crash.warm  # noqa: F401  # kernels and formats are loaded before anything is recorded
from tools.powerloss.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.powerloss", description=__doc__)
    parser.add_argument("--states", type=int, default=2000, help="how many states of the disk (default: 2000)")
    parser.add_argument("--sessions", type=int, default=8, help="how many sessions with a store (default: 8)")
    parser.add_argument(
        "--steps", type=int, default=0, help="things done before and after a kill (default: 30; zarr: 6)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sessions and crashes (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-power-") as temporary:
        sessions, steps = range(options.sessions), options.steps
        result = run_campaign(Path(temporary), options.states, sessions, options.seed, steps=steps, progress=_show)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{result.states} states of {result.possible} crashes in {result.operations} operations, "
        f"{result.seconds:.0f} s: {result.compared} trajectories compared, {len(result.problems)} problems\n"
    )
    return 1 if result.problems else 0


def _show(result: Result) -> None:
    if sys.stderr.isatty() or result.states % 100 == 0:
        sys.stderr.write(f"{result.states} states, {len(result.problems)} problems, {result.seconds:.0f} s\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
