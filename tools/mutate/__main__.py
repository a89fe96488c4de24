"""``python -m tools.mutate --mutations 10000 --seed 0``: exit code 0 if nothing was wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import orjson

from tools.mutate.campaign import Result, run_campaign
from tools.mutate.pristine import KINDS, kinds_of


def main() -> int:
    """Run a campaign and say what it found."""
    groups = sorted({kind.name.split("_")[0] for kind in KINDS} | {kind.name for kind in KINDS})
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000, help="how many, all kinds together (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage (default: 0)")
    parser.add_argument("--kind", choices=groups, help="of which kind, or group of kinds (default: all)")
    parser.add_argument("--only", type=int, help="the one mutation of a kind with this number")
    parser.add_argument("--folder", type=Path, help="empty folder to work in and leave (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    options = parser.parse_args()
    kinds = kinds_of(options.kind)
    if options.only is not None and len(kinds) != 1:
        parser.error("--only needs the --kind of the mutation")
    with tempfile.TemporaryDirectory(prefix="trajstore-mutate-") as temporary:
        folder = options.folder or Path(temporary)
        result = run_campaign(folder, kinds, options.mutations, options.seed, only=options.only, progress=_show)
    sys.stdout.write(orjson.dumps(result.to_json()).decode() + "\n" if options.json else _table(result))
    return 1 if result.troubles else 0


def _show(result: Result) -> None:
    if result.troubles and result.troubles[-1].place == result.mutations:
        sys.stderr.write(f"{result.troubles[-1]}\n")
    if sys.stderr.isatty() or result.mutations % 500 == 0:
        end = "\r" if sys.stderr.isatty() else "\n"
        sys.stderr.write(
            f"{result.mutations} mutations, {len(result.troubles)} with problems, {result.seconds:.0f} s{end}"
        )
        sys.stderr.flush()


def _table(result: Result) -> str:
    lines = [str(trouble) for trouble in result.troubles]
    kinds: Counter[tuple[str, str]] = Counter()
    levels: Counter[tuple[str, str]] = Counter()
    for (kind, level, outcome), count in result.outcomes.items():
        kinds[kind, outcome] += count
        levels[level, outcome] += count
    for title, counts in (("kind", kinds), ("what was changed", levels)):
        outcomes = sorted({outcome for _, outcome in counts})
        lines += ["", " | ".join([f"{title:26}", "all", *outcomes])]
        for name in dict.fromkeys(name for name, _ in counts):
            row = [counts[name, outcome] for outcome in outcomes]
            lines.append(" | ".join([f"{name:26}", str(sum(row)), *map(str, row)]))
    lines += [
        "",
        f"{result.mutations} mutations in {result.seconds:.0f} s (the slowest {result.slowest:.1f} s): "
        f"{len(result.troubles)} with problems",
    ]
    return "\n".join(lines).lstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
