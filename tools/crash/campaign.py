"""Kill or interrupt one child after the other, and compare the store with their promises."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from tests.support.witness import WitnessError, check_trajectory
from tools.campaigns import Result, at_work, wait_for
from tools.crash.child import WAYS, work
from tools.crash.journal import entries
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import TrajstoreError
from trajstore.operations.verify import verify


def _has_flushed(journal: Path) -> bool:
    return b'"flushed"' in journal.read_bytes()


_LONGEST_LIFE = 0.8  # seconds, once a child has begun
_AFTER_PROMISE = 0.05  # longest life after the first promise, in seconds
_PATIENCE = 240.0  # seconds until an interrupted child counts as hung


@dataclass
class Promises:
    """The promises of all children so far.

    Attributes:
        flushed: the key of each trajectory that was there when a ``flush`` returned, by id.
        evicting: ids whose eviction has begun.
        seen: the key of each trajectory ever promised or read, by id.
    """

    flushed: dict[int, int] = field(default_factory=dict)
    evicting: set[int] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)

    def take(self, journal: Path) -> None:
        """Add a child's journal."""
        for entry in entries(journal):
            if entry["event"] == "flushed":
                self.flushed |= entry["keys"]
            else:
                self.evicting |= {*entry["ids"]}
        self.seen |= self.flushed

    def compare(self, folder: Path, problem: Callable[[str], None]) -> int:
        """Compare ``folder/store`` and ``folder/checkpoint``; return the number of trajectories in the store."""
        present = _read(folder / "store", problem)
        for number, key in self.flushed.items():
            if number not in present and number not in self.evicting:
                problem(f"trajectory {number} (key {key}) was flushed and is lost")
        for number, key in (*present.items(), *_read(folder / "checkpoint", problem).items()):
            if self.seen.setdefault(number, key) != key:
                problem(f"id {number} has the key {key}, before {self.seen[number]}")
        self.flushed = {number: key for number, key in self.flushed.items() if number in present}
        return len(present)


def _read(path: Path, problem: Callable[[str], None]) -> dict[int, int]:
    """Verify a directory and return the key of each trajectory by id; none before the directory is complete."""
    if not (path / "metadata.json").exists():
        return {}
    try:
        for trouble in verify(path).problems[:3]:
            problem(f"{path.name}/{trouble.file}: {trouble.message}")
        with TrajectoryReplayBuffer.open(path) as reader:
            return {number: check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()}
    except (TrajstoreError, WitnessError, OSError) as error:
        problem(f"{path.name} cannot be read: {type(error).__name__}: {error}")
        return {}


def run_campaign(
    folder: Path,
    kills: int,
    seed: int,
    progress: Callable[[Result], None] | None = None,
    sent: Literal["KILL", "INT"] = "KILL",
) -> Result:
    """Kill ``kills`` children that work on one store after the other; return the problems.

    Args:
        folder: an empty folder; store, checkpoint and journals stay in it.
        kills: number of children.
        seed: of the children's actions and of the moments (the machine's timing adds its own chance).
        progress: called after each kill.
        sent: the signal; after SIGINT the child has to end by itself.
    """
    chance = random.Random(seed)
    with at_work(int) as loaded:  # the fork server starts with the first child
        loaded.join()
    result, promises = Result(), Promises()
    for number in range(kills):
        journal = folder / f"journal_{number}"

        def problem(text: str, where: str = f"kill {number}") -> None:
            result.problems.append(f"{where}: {text}")

        with at_work(work, folder, number, seed) as child:
            wait_for(child, journal.exists)
            child.join(chance.uniform(0.02, _LONGEST_LIFE))
            if number % 4:  # every fourth may be without a promise; others have one, however slow the machine
                wait_for(child, partial(_has_flushed, journal))
                child.join(chance.uniform(0.0, _AFTER_PROMISE))
            if not child.is_alive():
                problem(f"the child ended by itself with exit code {child.exitcode}")
            if sent == "INT":
                result.slowest = max(result.slowest, _interrupt(child, folder, number, problem))
        promises.take(journal)
        result.counts["promises checked"] += len(promises.flushed)
        result.counts["trajectories compared"] += promises.compare(folder, problem)
        result.counts["kills"] += 1
        if progress is not None:
            progress(result)
    return result


def _interrupt(child: BaseProcess, folder: Path, number: int, problem: Callable[[str], None]) -> float:
    """Send SIGINT, wait for the child's end, and return the seconds that it took."""
    begin, error = time.monotonic(), folder / f"error_{number}"
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGINT)
        child.join(_PATIENCE)
    seconds = time.monotonic() - begin
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGUSR1)
        child.join(1.0)
        problem(f"did not {WAYS[number % len(WAYS)]}: {(folder / f'stacks_{number}').read_text()}")
    elif error.exists():
        problem(f"to {WAYS[number % len(WAYS)]} failed: {error.read_text()}")
    return seconds
