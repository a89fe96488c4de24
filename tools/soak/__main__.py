"""``python -m tools.soak --minutes 60``: exit code 0 if nothing grew and nothing was wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.soak.measure import table
from tools.soak.session import Plan, Result, judge, soak


def main() -> int:
    """Use a store for a while and say what it took."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is done (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-soak-") as temporary:
        result = soak(Path(temporary), Plan(60 * options.minutes), options.seed, _show)
    problems = judge(result)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"medians of the quarters\n{table(result.samples)}\n")
    sys.stdout.write(
        f"{result.added} trajectories in {options.minutes:g} minutes, {result.rows} rows checked by followers, "
        f"shards at most {result.worst:.2f} x live bytes, {len(problems)} problems\n"
    )
    return 1 if problems else 0


def _show(result: Result) -> None:
    sys.stderr.write(f"{len(result.samples)}: {result.samples[-1]}, {len(result.problems)} problems\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
