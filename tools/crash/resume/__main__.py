"""``python -m tools.crash.resume --kills 100 --seed 0``: exit code 0 if both runs are equal."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.crash.resume.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash.resume", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how often to kill (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-resume-") as temporary:
        result = run_campaign(Path(temporary), options.kills, options.seed, _show)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    for moment, count in result.kills.items():
        sys.stdout.write(f"{count:4} {moment}\n")
    sys.stdout.write(
        f"{sum(result.kills.values())} kills in {result.seconds:.0f} s, {result.steps} steps compared, "
        f"{len(result.problems)} problems\n"
    )
    return 1 if result.problems else 0


def _show(result: Result) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{sum(result.kills.values())} kills, step {max(result.resumed, default=0)} ")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
