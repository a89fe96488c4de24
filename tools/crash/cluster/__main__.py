"""``python -m tools.crash.cluster --seconds 60``: exit code 0 if nothing acknowledged is lost, torn or there twice."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.cluster.campaign import run

if __name__ == "__main__":
    parser = command("tools.crash.cluster", __doc__, "what is killed when")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long producers add")
    parser.add_argument("--producers", type=int, default=8, help="how many")
    sys.exit(main(parser, run))
