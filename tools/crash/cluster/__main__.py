"""``python -m tools.crash.cluster --seconds 60``: exit code 0 if nothing acknowledged is lost, torn or there twice."""

from __future__ import annotations

import sys

from tools.campaigns import command, run
from tools.crash.cluster.campaign import run as run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.crash.cluster", __doc__, "what is killed when")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long producers add (default: 60)")
    parser.add_argument("--producers", type=int, default=8, help="how many (default: 8)")
    options = parser.parse_args()
    return run(
        options,
        lambda folder: run_campaign(folder, options.seconds, options.producers, options.seed),
        lambda result: (
            f"{result.actors_killed} actors and {result.nodes_killed} nodes killed in {options.seconds:g} s: "
            f"{result.acknowledged} trajectories acknowledged, {result.stored} stored, {result.errors} errors told to "
            f"producers, {result.retries} parcels sent again"
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
