"""``python -m tools.crash.node --rounds 50``: exit code 0 if nothing that was on the mirror is ever lost."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.campaigns import command, run
from tools.crash.node.campaign import Result, s3
from tools.crash.node.campaign import run as run_campaign


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.crash.node", __doc__, "what is done when")
    parser.add_argument("--rounds", type=int, default=50, help="how often the node is lost (default: 50)")
    parser.add_argument("--local", action="store_true", help="mirror to a folder instead of an S3 server (moto)")
    options = parser.parse_args()

    def campaign(folder: Path) -> Result:
        if options.local:
            return run_campaign(folder, f"{folder}/mirrors", {}, options.rounds, options.seed)
        with s3() as (url, storage_options):
            return run_campaign(folder, url, storage_options, options.rounds, options.seed)

    return run(
        options,
        campaign,
        lambda result: (
            f"{result.rounds} nodes lost in {result.seconds:.0f} s, {result.frozen} of them only frozen, "
            f"{result.restores_killed} restores killed and taken up: {result.below_watermark} trajectories below the "
            f"watermark compared, {result.compared} in all, {result.lost_above} above it were lost"
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
