"""``python -m tools.threads --seconds 600``: exit code 0 if every row was right and no process died."""

from __future__ import annotations

import sys

from tools.campaigns import command, main
from tools.threads.campaign import run_campaign
from tools.threads.session import REPLACERS
from trajstore._core.formats import FORMATS

if __name__ == "__main__":
    parser = command("tools.threads", __doc__, "what is replaced, changed and read")
    parser.add_argument("--seconds", type=float, default=600, help="of each session")
    parser.add_argument("--replacer", choices=REPLACERS, nargs="+", default=REPLACERS, help="what replaces contents")
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=list(FORMATS), dest="form", help="of stores")
    sys.exit(main(parser, run_campaign))
