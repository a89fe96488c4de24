"""``python -m tools.crash.peers PEER --python PATH --kills 40``: exit code 1 if rollouts were lost or changed."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.peers.campaign import run_campaign, summary
from tools.crash.peers.child import PEERS

if __name__ == "__main__":
    parser = command("tools.crash.peers", __doc__, "moments")
    parser.add_argument("peer", help=f"{', '.join(PEERS)}, or module:class")
    parser.add_argument("--kills", type=int, default=40, help="number of kills")
    parser.add_argument("--python", default=sys.executable, help="interpreter in which the store is installed")
    parser.add_argument("--moment", choices=("random", "sync"), default="random", help="random, or before an fsync")
    parser.add_argument("--power", action="store_true", help="after each kill, files have only their synced content")
    parser.add_argument("--longest", type=float, default=0.5, help="seconds of adding before a kill")
    sys.exit(main(parser, run_campaign, summary))
