"""``python -m tools.crash --kills 200 --seed 0``: exit code 0 if nothing was lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.crash.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how often to kill (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of actions and moments (default: 0)")
    parser.add_argument("--signal", choices=("KILL", "INT"), default="KILL", help="what is sent (default: KILL)")
    parser.add_argument("--folder", type=Path, help="empty folder to work in and leave (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-crash-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run_campaign(folder, options.kills, options.seed, _show, interrupt=options.signal == "INT")
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{result.kills} kills in {result.seconds:.0f} s: {result.promised} promises checked, "
        f"{result.checked} trajectories compared, {len(result.problems)} problems\n"
    )
    if options.signal == "INT":
        sys.stdout.write(f"the slowest child took {result.slowest:.1f} s to end\n")
    return 1 if result.problems else 0


def _show(result: Result) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{result.kills} kills, {result.checked} trajectories, {len(result.problems)} problems ")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
