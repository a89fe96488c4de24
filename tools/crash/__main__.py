"""``python -m tools.crash --kills 200 --seed 0``: exit code 0 if nothing was lost."""

from __future__ import annotations

import sys

from tools.campaigns import command, run, show
from tools.crash.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.crash", __doc__, "actions and moments")
    parser.add_argument("--kills", type=int, default=200, help="how often to kill (default: 200)")
    parser.add_argument("--signal", choices=("KILL", "INT"), default="KILL", help="what is sent (default: KILL)")
    options = parser.parse_args()
    interrupt = options.signal == "INT"
    return run(
        options,
        lambda folder: run_campaign(folder, options.kills, options.seed, _show, interrupt=interrupt),
        _summary_of_interrupts if interrupt else _summary,
    )


def _summary(result: Result) -> str:
    return (
        f"{result.kills} kills in {result.seconds:.0f} s: {result.promised} promises checked, "
        f"{result.checked} trajectories compared"
    )


def _summary_of_interrupts(result: Result) -> str:
    return f"the slowest child took {result.slowest:.1f} s to end\n{_summary(result)}"


def _show(result: Result) -> None:
    show(f"{result.kills} kills, {result.checked} trajectories, {len(result.problems)} problems")


if __name__ == "__main__":
    sys.exit(main())
