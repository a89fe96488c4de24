"""``python -m tools.crash.cluster --seconds 3600``: exit code 0 if nothing is lost, changed, stale or twice.

Needs Linux and root: each node has its own network and disk.
"""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.cluster.campaign import run

if __name__ == "__main__":
    parser = command("tools.crash.cluster", __doc__, "what happens to which node when")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long clients work")
    parser.add_argument("--producers", type=int, default=4, help="how many")
    parser.add_argument("--judges", type=int, default=2, help="how many")
    sys.exit(main(parser, run))
