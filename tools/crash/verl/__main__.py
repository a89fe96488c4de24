"""``python -m tools.crash.verl --kills 10 --seed 0``: exit code 0 if nothing was lost and training went on."""

from __future__ import annotations

import sys
from typing import get_args

from tools.campaigns import command, main
from tools.crash.verl.campaign import run_campaign
from trainer_hooks.verl.config import OnResume

if __name__ == "__main__":
    parser = command("tools.crash.verl", __doc__, "the moments")
    parser.add_argument("--kills", type=int, default=10, help="how often to kill")
    parser.add_argument("--on-resume", choices=get_args(OnResume), default="exact", help="exp_manager.on_resume")
    sys.exit(main(parser, run_campaign))
