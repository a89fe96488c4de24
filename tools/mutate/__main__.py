"""``python -m tools.mutate --mutations 10000 --seed 0``: exit code 0 if no problem was found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tools.campaigns import Result, command, main
from tools.mutate.campaign import run_campaign
from tools.mutate.pristine import KINDS, kinds_of


def _campaign(folder: Path, kind: str | None, only: int | None, **options: Any) -> Result:
    kinds = kinds_of(kind)
    if only is not None and len(kinds) != 1:
        raise SystemExit("--only needs the --kind of the mutation")
    return run_campaign(folder, kinds, only=only, **options)


if __name__ == "__main__":
    groups = sorted({kind.name.split("_")[0] for kind in KINDS} | {kind.name for kind in KINDS})
    parser = command("tools.mutate", __doc__, "the damage")
    parser.add_argument("--mutations", type=int, default=10_000, help="number of mutations of all kinds")
    parser.add_argument("--kind", choices=groups, help="a kind, or a group of kinds; default: all")
    parser.add_argument("--only", type=int, help="number of a single mutation of a kind")
    sys.exit(main(parser, _campaign))
