"""``python -m tools.crash.resume --kills 100 --seed 0``: exit code 0 if both runs are equal."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.resume.campaign import run_campaign

if __name__ == "__main__":
    parser = command("tools.crash.resume", __doc__, "the moments")
    parser.add_argument("--kills", type=int, default=100, help="how often to kill")
    sys.exit(main(parser, run_campaign))
