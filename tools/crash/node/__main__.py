"""``python -m tools.crash.node --rounds 50``: exit code 0 if nothing that was on the mirror is ever lost."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from tools.campaigns import Result, command, main
from tools.crash.node.campaign import run, s3


def _campaign(folder: Path, rounds: int, seed: int, local: bool, progress: object) -> Result:
    with nullcontext((f"{folder}/mirrors", {})) if local else s3() as (mirrors, storage_options):
        return run(folder, mirrors, storage_options, rounds, seed)


if __name__ == "__main__":
    parser = command("tools.crash.node", __doc__, "what is done when")
    parser.add_argument("--rounds", type=int, default=50, help="how often the node is lost")
    parser.add_argument("--local", action="store_true", help="mirror to a folder instead of an S3 server (moto)")
    sys.exit(main(parser, _campaign))
