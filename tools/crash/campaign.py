"""Kill, look, go on: the parent's side."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.crash.child import torture
from tools.crash.journal import Promises, read_journal
from tools.crash.look import look

_LONGEST_LIFE = 0.8  # seconds


@dataclass
class Result:
    """What a campaign found.

    Attributes:
        kills: children killed.
        problems: what was wrong, each with the number of the kill.
        checked: trajectories read back and compared, all kills together.
        promised: trajectories whose ``flush`` had returned, counted at each kill.
        commits: generation of the store in the end.
        seconds: how long it took.
    """

    kills: int = 0
    problems: list[str] = field(default_factory=list)
    checked: int = 0
    promised: int = 0
    commits: int = 0
    seconds: float = 0.0


def run_campaign(folder: Path, kills: int, seed: int, progress: Callable[[Result], None] | None = None) -> Result:
    """Kill ``kills`` children that work on one store after the other; return what was found.

    Args:
        folder: an empty folder; store, checkpoint and journals are left in it.
        kills: how many.
        seed: of the children's actions and of the moments (the machine's timing adds its own chance).
        progress: told after each kill.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.crash.child", "tools.crash.warm"])
    chance = random.Random(seed)
    loaded = context.Process(target=int)  # the fork server starts with the first child
    loaded.start()
    loaded.join()
    result, promises = Result(), Promises()
    seen: dict[int, int] = {}
    start = time.monotonic()
    for number in range(kills):
        child = context.Process(target=torture, args=(str(folder), number, seed), daemon=True)
        child.start()
        child.join(chance.uniform(0.02, _LONGEST_LIFE))
        died = not child.is_alive()
        child.kill()
        child.join()
        if died:
            result.problems.append(f"kill {number}: the child ended by itself with exit code {child.exitcode}")
        journal = folder / f"journal_{number:06d}"
        if journal.exists():
            read_journal(journal, promises)
        _look(folder, number, promises, seen, result)
        result.kills += 1
        result.seconds = time.monotonic() - start
        if progress is not None:
            progress(result)
    return result


def _look(folder: Path, number: int, promises: Promises, seen: dict[int, int], result: Result) -> None:
    """Check store, pins and checkpoint against what was promised."""

    def problem(text: str) -> None:
        result.problems.append(f"kill {number}: {text}")

    present = look(folder, promises, problem)
    if present is None:
        return
    result.checked += len(present)
    result.promised += len(promises.flushed)
    for trajectory_id, key in present.items():
        if seen.setdefault(trajectory_id, key) != key:
            problem(f"id {trajectory_id} was given twice")
    promises.forget(present)
