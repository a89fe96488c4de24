"""Sessions of threads, each in a process of its own: one that dies has found something, and ends nothing else."""

from __future__ import annotations

import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.campaigns import Result, start
from tools.threads.session import FOUND, TOLD, run

_LAST_LINES = 60


def run_session(folder: Path, replacer: str, form: str, seconds: float, seed: int) -> Result:
    """Return what one session found; its death is a problem."""
    folder.mkdir(parents=True)
    child = start(run, folder, replacer, form, seconds, seed)
    child.join()
    code = child.exitcode or 0
    if code == 0:
        found = json.loads((folder / FOUND).read_bytes())
        return Result(problems=found["problems"], counts=Counter(found["counts"]))
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    told = "\n".join((folder / TOLD).read_text(errors="replace").splitlines()[-_LAST_LINES:])
    return Result(problems=[f"the process ended by {how}:\n{told}"])


def run_campaign(
    folder: Path,
    replacer: Sequence[str],
    form: Sequence[str],
    seconds: float,
    seed: int,
    progress: Callable[[Result], None],
) -> Result:
    """Run a session for each replacer and each format."""
    result = Result()
    for one, kind in itertools.product(replacer, form):
        found = run_session(folder / f"{one}-{kind}", one, kind, seconds, seed)
        result.counts["processes"] += 1
        result.counts += found.counts
        result.problems += [f"{one}, {kind}, seed {seed}: {problem}" for problem in found.problems]
        progress(result)
    return result
