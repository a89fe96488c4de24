"""``python -m tools.crash.cluster --seconds 60``: exit code 0 if nothing acknowledged is lost, torn or there twice."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.crash.cluster.campaign import run


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash.cluster", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long producers add (default: 60)")
    parser.add_argument("--producers", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is killed when (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-cluster-") as folder:
        result = run(Path(folder), options.seconds, options.producers, options.seed)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{result.actors_killed} actors and {result.nodes_killed} nodes killed in {options.seconds:g} s: "
        f"{result.acknowledged} trajectories acknowledged, {result.stored} stored, {result.errors} errors told to "
        f"producers, {result.retries} parcels sent again, {len(result.problems)} problems\n"
    )
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
