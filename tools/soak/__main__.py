"""``python -m tools.soak --minutes 60``: exit code 0 if nothing grew and nothing was wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tools.campaigns import command, run
from tools.soak.measure import table
from tools.soak.session import Plan, Result, judge, soak


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.soak", __doc__, "what is done")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    options = parser.parse_args()

    def campaign(folder: Path) -> Result:
        result = soak(folder, Plan(60 * options.minutes), options.seed, _show)
        return replace(result, problems=judge(result))

    return run(
        options,
        campaign,
        lambda result: (
            f"medians of the quarters\n{table(result.samples)}\n"
            f"{result.added} trajectories in {options.minutes:g} minutes, {result.rows} rows checked by followers, "
            f"shards at most {result.worst:.2f} x live bytes"
        ),
    )


def _show(result: Result) -> None:
    sys.stderr.write(f"{len(result.samples)}: {result.samples[-1]}, {len(result.problems)} problems\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
