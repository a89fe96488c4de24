"""``python -m tools.powerloss --states 2000 --seed 0``: exit code 0 if nothing was lost."""

from __future__ import annotations

import sys

import tools.crash.warm  # noqa: F401  # kernels and formats are loaded before anything is recorded
from tools.campaigns import command, run
from tools.powerloss.campaign import Result, run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.powerloss", __doc__, "sessions and crashes")
    parser.add_argument("--states", type=int, default=2000, help="how many states of the disk (default: 2000)")
    parser.add_argument("--sessions", type=int, default=8, help="how many sessions with a store (default: 8)")
    parser.add_argument(
        "--steps", type=int, default=0, help="things done before and after a kill (default: 30; zarr: 6)"
    )
    options = parser.parse_args()
    sessions, steps = range(options.sessions), options.steps
    return run(
        options,
        lambda folder: run_campaign(folder, options.states, sessions, options.seed, steps=steps, progress=_show),
        lambda result: (
            f"{result.states} states of {result.possible} crashes in {result.operations} operations, "
            f"{result.seconds:.0f} s: {result.compared} trajectories compared"
        ),
    )


def _show(result: Result) -> None:
    if sys.stderr.isatty() or result.states % 100 == 0:
        sys.stderr.write(f"{result.states} states, {len(result.problems)} problems, {result.seconds:.0f} s\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
