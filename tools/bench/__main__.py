"""Run benchmarks: ``python -m tools.bench [t1 t2 ...] [--json] [--repeats 7] [--scale 1.0] [--folder DIR]``.

Prints one JSON line per figure, and a table in the end. Without names it runs all that need no GPU, in some minutes
with up to 8 GB of disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tools.bench.report import Figure, Options, SkippedError, table

_FILES = sorted(file.stem for file in Path(__file__).parent.glob("t??_*.py") if not file.stem.startswith("t13"))
BENCHMARKS = {
    **{f"t{int(file[1:3])}": f"{file}.figures" for file in _FILES},  # T13 is a command of its own
    **{"t1": "t01_sample.cached", "t2": "t01_sample.uncached"},
    **{"t16": "t16_verl.figures", "t16admit": "t16_admit.figures"},
    **{f"gpu_{name}": f"gpu.{name}" for name in ("loader", "loss", "threads")},
}
"""Module and function of each benchmark, imported when it runs, so that others do not need its packages."""


def figures_of(name: str, options: Options) -> Iterator[Figure]:
    """Run a benchmark."""
    module, _, function = BENCHMARKS[name].partition(".")
    found: Iterator[Figure] = getattr(importlib.import_module(f"tools.bench.{module}"), function)(options)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks of the command line; return 0, also if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="tN", help=f"which (all but those on a GPU): {' '.join(BENCHMARKS)}"
    )
    parser.add_argument("--json", action="store_true", help="only JSON lines, no table")
    parser.add_argument("--repeats", type=int, default=7, help="how often each thing is timed (7)")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads (1)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to be measured (the temporary folder)")
    chosen = parser.parse_args(arguments)
    names = [name.lower() for name in chosen.names] or [name for name in BENCHMARKS if not name.startswith("gpu_")]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {' '.join(BENCHMARKS)}")
    figures: list[Figure] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"trajstore_{name}_", dir=chosen.folder) as folder:
            try:
                for figure in figures_of(name, Options(Path(folder), chosen.repeats, chosen.scale)):
                    figures.append(figure)
                    sys.stdout.write(figure.line() + "\n")
                    sys.stdout.flush()
            except SkippedError as reason:
                sys.stdout.write(json.dumps({"id": name.upper(), "skipped": str(reason)}) + "\n")
    if not chosen.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        sys.stdout.write(f"\n{table(figures)}\n\n{device}, torch {torch.__version__}, {os.cpu_count()} cores\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
