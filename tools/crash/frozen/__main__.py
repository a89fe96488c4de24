"""``python -m tools.crash.frozen --freezes 100 --seed 0``: exit code 0 if nothing was overwritten or lost."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.crash.frozen.campaign import run_campaign

if __name__ == "__main__":
    parser = command("tools.crash.frozen", __doc__, "actions and moments")
    parser.add_argument("--freezes", type=int, default=100, help="how many writers to freeze")
    sys.exit(main(parser, run_campaign))
