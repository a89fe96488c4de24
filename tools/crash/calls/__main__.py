"""``python -m tools.crash.calls --kills 200 --seed 0``: exit code 0 if no call was lost or doubled."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.calls.campaign import run_campaign

if __name__ == "__main__":
    parser = command("tools.crash.calls", __doc__, "calls and moments")
    parser.add_argument("--kills", type=int, default=200, help="how often to kill")
    sys.exit(main(parser, run_campaign))
