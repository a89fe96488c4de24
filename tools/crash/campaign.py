"""Kill, look, go on: the parent's side."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from tools.campaigns import Result, at_work, wait_for
from tools.crash.child import torture
from tools.crash.interrupted import WAYS, error_file, stacks_file, work
from tools.crash.journal import Promises, read_journal
from tools.crash.look import look

_LONGEST_LIFE = 0.8  # seconds, once a child has begun
_AFTER_PROMISE = 0.05  # seconds that one lives, at most, whose first promise came later
_PATIENCE = 240.0  # seconds; who has not come to an end then never will


def run_campaign(
    folder: Path,
    kills: int,
    seed: int,
    progress: Callable[[Result], None] | None = None,
    sent: Literal["KILL", "INT"] = "KILL",
) -> Result:
    """Kill ``kills`` children that work on one store after the other; return what was found.

    Args:
        folder: an empty folder; store, checkpoint and journals are left in it.
        kills: how many.
        seed: of the children's actions and of the moments (the machine's timing adds its own chance).
        progress: told after each kill.
        sent: the signal; after SIGINT the child has to come to an end by itself.
    """
    chance, interrupt = random.Random(seed), sent == "INT"
    with at_work(int) as loaded:  # the fork server starts with the first child
        loaded.join()
    result, promises = Result(), Promises()
    seen: dict[int, int] = {}
    for number in range(kills):
        journal = folder / f"journal_{number:06d}"
        with at_work(work if interrupt else torture, str(folder), number, seed) as child:
            life = chance.uniform(0.02, _LONGEST_LIFE)
            _wait_for(journal, b"", child)
            child.join(life)
            if number % 4:  # every fourth may have come to nothing, others have a promise, however slow the machine
                _wait_for(journal, b'"flushed"', child)
                child.join(chance.uniform(0.0, _AFTER_PROMISE))
            if not child.is_alive():
                result.problems.append(f"kill {number}: the child ended by itself with exit code {child.exitcode}")
            if interrupt:
                _interrupt(child, folder, number, result)
        if journal.exists():
            read_journal(journal, promises)
        _look(folder, number, promises, seen, result)
        result.counts["kills"] += 1
        if progress is not None:
            progress(result)
    return result


def _wait_for(journal: Path, text: bytes, child: BaseProcess) -> None:
    """Wait until a child has made its journal and noted this text there."""
    wait_for(child, lambda: journal.exists() and text in journal.read_bytes())


def _interrupt(child: BaseProcess, folder: Path, number: int, result: Result) -> None:
    """Send SIGINT, and wait for the child to end."""
    begin = time.monotonic()
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGINT)
        child.join(_PATIENCE)
    result.slowest = max(result.slowest, time.monotonic() - begin)
    where = f"kill {number} ({WAYS[number % len(WAYS)]})"
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGUSR1)
        child.join(1.0)
        result.problems.append(f"{where}: did not end: {stacks_file(folder, number).read_text()}")
    elif error_file(folder, number).exists():
        result.problems.append(f"{where}: {error_file(folder, number).read_text()}")


def _look(folder: Path, number: int, promises: Promises, seen: dict[int, int], result: Result) -> None:
    """Check store, pins and checkpoint against what was promised."""

    def problem(text: str) -> None:
        result.problems.append(f"kill {number}: {text}")

    present = look(folder, promises, problem)
    if present is None:
        return
    result.counts["trajectories compared"] += len(present)
    result.counts["promises checked"] += len(promises.flushed)
    for trajectory_id, key in present.items():
        if seen.setdefault(trajectory_id, key) != key:
            problem(f"id {trajectory_id} was given twice")
    promises.forget(present)
