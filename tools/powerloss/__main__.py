"""``python -m tools.powerloss --states 2000 --seed 0``: exit code 0 if nothing was lost."""

from __future__ import annotations

import sys

import tools.crash.warm  # noqa: F401  # load kernels and formats before recording
from tools.campaigns import command, main
from tools.powerloss.campaign import run_campaign

if __name__ == "__main__":
    parser = command("tools.powerloss", __doc__, "sessions and crashes")
    parser.add_argument("--states", type=int, default=2000, help="number of disk states")
    parser.add_argument("--sessions", type=lambda text: range(int(text)), default="8", help="sessions with a store")
    sys.exit(main(parser, run_campaign))
