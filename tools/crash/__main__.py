"""``python -m tools.crash --kills 200 --seed 0``: exit code 0 if nothing was lost."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.campaign import run_campaign

if __name__ == "__main__":
    parser = command("tools.crash", __doc__, "actions and moments")
    parser.add_argument("--kills", type=int, default=200, help="how often to kill")
    parser.add_argument("--signal", choices=("KILL", "INT"), default="KILL", dest="sent", help="what is sent")
    sys.exit(main(parser, run_campaign))
