"""``python -m tools.crash.verl --kills 10 --seed 0``: exit code 0 if nothing was lost and training went on."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import get_args

from tools.crash.verl.campaign import Result, run_campaign
from trainer_hooks.verl.config import OnResume


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash.verl", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="how often to kill (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: 0)")
    parser.add_argument(
        "--on-resume", choices=get_args(OnResume), default="exact", help="exp_manager.on_resume (default: exact)"
    )
    parser.add_argument("--folder", type=Path, help="empty folder to work in and leave (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajstore-crash-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        result = run_campaign(folder, options.kills, options.seed, _show, on_resume=options.on_resume)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    phases = ", ".join(f"{phase} {count}" for phase, count in sorted(result.phases.items()))
    sys.stdout.write(f"resumed at steps {result.resumed}; last phase before the kill: {phases}\n")
    if options.on_resume == "keep":
        sys.stdout.write(f"{result.since} times an acknowledged rollout had to be in the pool that the cut had not\n")
    sys.stdout.write(
        f"{result.kills} kills in {result.seconds:.0f} s, {result.between} between our cut and verl's checkpoint: "
        f"{result.steps} steps trained, {result.rollouts} acknowledged rollouts, {result.checked} comparisons, "
        f"{len(result.problems)} problems\n"
    )
    return 1 if result.problems else 0


def _show(result: Result) -> None:
    sys.stderr.write(
        f"{result.kills} kills, {result.seconds:.0f} s, resumed at {result.resumed[-1]}, "
        f"{result.between} between, {result.survivors} survivors, {len(result.problems)} problems\n"
    )
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
