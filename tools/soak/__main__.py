"""``python -m tools.soak --minutes 60``: exit code 0 if nothing grew and nothing was wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tools.campaigns import command, counted, main
from tools.soak.measure import table
from tools.soak.session import Plan, Result, judge, soak


def _campaign(folder: Path, minutes: float, seed: int, progress: object) -> Result:
    result = soak(folder, Plan(60 * minutes), seed, _show)
    return replace(result, problems=judge(result))


def _summary(result: Result) -> str:
    return (
        f"medians of the quarters\n{table(result.samples)}\n{counted(result)}\n"
        f"shards at most {result.worst:.2f} x live bytes"
    )


def _show(result: Result) -> None:
    sys.stderr.write(f"{len(result.samples)}: {result.samples[-1]}, {len(result.problems)} problems\n")
    sys.stderr.flush()


if __name__ == "__main__":
    parser = command("tools.soak", __doc__, "the calls")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    sys.exit(main(parser, _campaign, _summary))
