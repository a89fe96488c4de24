"""``python -m tools.threads --seconds 600``: exit code 0 if every row was right and no process died."""

from __future__ import annotations

import sys

from tools.campaigns import command, run, show
from tools.threads.campaign import Result, run_campaign
from tools.threads.session import FORMATS, REPLACERS


def main() -> int:
    """Run a campaign and say what it found."""
    parser = command("tools.threads", __doc__, "what is replaced, changed and read")
    parser.add_argument("--seconds", type=float, default=600, help="of each session (default: 600)")
    parser.add_argument("--replacer", choices=REPLACERS, action="append", help="what replaces contents (default: each)")
    parser.add_argument("--format", choices=FORMATS, action="append", help="format of the stores (default: each)")
    options = parser.parse_args()
    replacers, formats = options.replacer or REPLACERS, options.format or FORMATS
    return run(
        options,
        lambda folder: run_campaign(folder, replacers, formats, options.seconds, options.seed, _show),
        lambda result: (
            f"{result.sessions} processes: {result.replaced} replacements beside {result.changed} evictions and "
            f"rewritings, {result.read} readings, {result.checked} comparisons with the store"
        ),
    )


def _show(result: Result) -> None:
    show(f"{result.sessions} processes, {result.replaced} replacements, {len(result.problems)} problems")


if __name__ == "__main__":
    sys.exit(main())
