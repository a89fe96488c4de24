"""``python -m tools.crash.node --rounds 50``: exit code 0 if nothing that was on the mirror is ever lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tools.crash.node.campaign import run, s3


def main() -> int:
    """Run a campaign and say what it found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash.node", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="how often the node is lost (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is done when (default: 0)")
    parser.add_argument("--local", action="store_true", help="mirror to a folder instead of an S3 server (moto)")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trajstore-node-") as folder:
        if options.local:
            result = run(Path(folder), f"{folder}/mirrors", {}, options.rounds, options.seed)
        else:
            with s3() as (url, storage_options):
                result = run(Path(folder), url, storage_options, options.rounds, options.seed)
    for problem in result.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{result.rounds} nodes lost in {time.monotonic() - began:.0f} s, {result.frozen} of them only frozen, "
        f"{result.restores_killed} restores killed and "
        f"taken up: {result.below_watermark} trajectories below the watermark compared, {result.compared} in all, "
        f"{result.lost_above} above it were lost, {len(result.problems)} problems\n"
    )
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
