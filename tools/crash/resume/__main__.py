"""``python -m tools.crash.resume --kills 100 --seed 0``: exit code 0 if both runs are equal."""

from __future__ import annotations

import sys

from tools.campaigns import command, run, show
from tools.crash.resume.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.crash.resume", __doc__, "the moments")
    parser.add_argument("--kills", type=int, default=100, help="how often to kill (default: 100)")
    options = parser.parse_args()
    return run(options, lambda folder: run_campaign(folder, options.kills, options.seed, _show), _summary)


def _summary(result: Result) -> str:
    moments = "".join(f"{count:4} {moment}\n" for moment, count in result.kills.items())
    kills = sum(result.kills.values())
    return f"{moments}{kills} kills in {result.seconds:.0f} s, {result.steps} steps compared"


def _show(result: Result) -> None:
    show(f"{sum(result.kills.values())} kills, step {max(result.resumed, default=0)}")


if __name__ == "__main__":
    sys.exit(main())
