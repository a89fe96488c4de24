"""``python -m tools.crash.verl --kills 10 --seed 0``: exit code 0 if nothing was lost and training went on."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.verl.campaign import run_campaign

if __name__ == "__main__":
    parser = command("tools.crash.verl", __doc__, "the moments")
    parser.add_argument("--kills", type=int, default=10, help="how often to kill")
    sys.exit(main(parser, run_campaign))
