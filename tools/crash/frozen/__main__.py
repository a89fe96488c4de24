"""``python -m tools.crash.frozen --freezes 100 --seed 0``: exit code 0 if nothing was overwritten or lost."""

from __future__ import annotations

import sys

from tools.campaigns import command, run, show
from tools.crash.frozen.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.crash.frozen", __doc__, "actions and moments")
    parser.add_argument("--freezes", type=int, default=100, help="how many writers to freeze (default: 100)")
    options = parser.parse_args()
    return run(options, lambda folder: run_campaign(folder, options.freezes, options.seed, _show), _summary)


def _summary(result: Result) -> str:
    points = "".join(f"{count:5d} {point}\n" for point, count in sorted(result.points.items()))
    return (
        f"{points}{result.freezes} writers frozen in {result.seconds:.0f} s, {result.fenced} of them told that they "
        f"lost the store, {result.promised} trajectories and {result.values} calls that gave values compared"
    )


def _show(result: Result) -> None:
    show(f"{result.freezes} writers, {len(result.problems)} problems")


if __name__ == "__main__":
    sys.exit(main())
