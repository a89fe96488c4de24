"""``python -m tools.crash.frozen --freezes 100 --seed 0``: exit code 0 if nothing was overwritten or lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.crash.frozen.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash.frozen", description=__doc__)
    parser.add_argument("--freezes", type=int, default=100, help="how many writers to freeze (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of actions and moments (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-frozen-") as folder:
        result = run_campaign(Path(folder), options.freezes, options.seed, _show)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    for point, count in sorted(result.points.items()):
        sys.stdout.write(f"{count:5d} {point}\n")
    sys.stdout.write(
        f"{result.freezes} writers frozen in {result.seconds:.0f} s, {result.fenced} of them told that they lost the "
        f"store, {result.promised} trajectories compared, {len(result.problems)} problems\n"
    )
    return 1 if result.problems else 0


def _show(result: Result) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{result.freezes} writers, {len(result.problems)} problems ")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
