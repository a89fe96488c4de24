"""``python -m tools.crash.verl --kills 10 --seed 0``: exit code 0 if nothing was lost and training went on."""

from __future__ import annotations

import sys
from typing import get_args

from tools.campaigns import command, run
from tools.crash.verl.campaign import Result, run_campaign
from trainer_hooks.verl.config import OnResume


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.crash.verl", __doc__, "the moments")
    parser.add_argument("--kills", type=int, default=10, help="how often to kill (default: 10)")
    parser.add_argument(
        "--on-resume", choices=get_args(OnResume), default="exact", help="exp_manager.on_resume (default: exact)"
    )
    options = parser.parse_args()
    return run(
        options,
        lambda folder: run_campaign(folder, options.kills, options.seed, _show, on_resume=options.on_resume),
        _summary,
    )


def _summary(result: Result) -> str:
    phases = ", ".join(f"{phase} {count}" for phase, count in sorted(result.phases.items()))
    kept = f"{result.since} times an acknowledged rollout had to be in the pool that the cut had not\n"
    return (
        f"resumed at steps {result.resumed}; last phase before the kill: {phases}\n"
        f"{kept if result.since else ''}{result.kills} kills in {result.seconds:.0f} s, "
        f"{result.between} between our cut and verl's checkpoint: "
        f"{result.steps} steps trained, {result.rollouts} acknowledged rollouts, {result.checked} comparisons"
    )


def _show(result: Result) -> None:
    sys.stderr.write(
        f"{result.kills} kills, {result.seconds:.0f} s, resumed at {result.resumed[-1]}, "
        f"{result.between} between, {result.survivors} survivors, {len(result.problems)} problems\n"
    )
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
