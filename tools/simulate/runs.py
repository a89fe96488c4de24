"""Runs of seeds, in processes forked from one that has loaded everything; a failing schedule made short."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from tools.simulate.world import Outcome, World

PATIENCE = 120.0
"""Seconds of real time that a run may take: only a wait that the simulator does not see takes long."""
BATCH = 40
"""Runs of a process. To fork it, and to copy the memory that it then changes, takes as long as a third of a run."""
_BASE = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
"""Folder of the runs' folders. How deep they lie decides steps: a store looks above it."""


Before = Callable[[], object]
"""Called in a process of runs first, for example to break something."""


class Runs:
    """Runs of seeds, one after the other, in a process that ends after the first one that fails.

    Args:
        seeds: each decides everything in its run.
        changes: those of an earlier run, to repeat.
        whole: keep the whole trace.
        before: called in the process first.
        slot: number of the process among those at the same time; decides the core.

    Attributes:
        left: seeds that have not ended.
        is_over: whether the process has ended.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        changes: Mapping[int, str] | None = None,
        *,
        whole: bool = False,
        before: Before | None = None,
        slot: int = 0,
    ) -> None:
        self.left, self.is_over, self._data = list(seeds), False, b""
        self.pipe, theirs = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self.pipe)
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[slot % len(cores)]})  # threads that take turns use one core,
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # and one that is woken waits for its turn
            self._run(theirs, changes, whole, before)
        os.close(theirs)

    def _run(self, out: int, changes: Mapping[int, str] | None, whole: bool, before: Before | None) -> NoReturn:
        worlds: list[World] = []  # never freed: what they leave must not end in another one's time
        try:
            if before is not None:
                before()
            for seed in self.left:
                worlds.append(World(seed, _BASE / f"simulated-{os.getpid()}-{seed}", changes, whole=whole))
                outcome = worlds[-1].run()
                with open(out, "wb", closefd=False) as file:
                    file.write(json.dumps(asdict(outcome)).encode() + b"\n")
                if outcome.problem:
                    break
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def ended(self) -> list[Outcome]:
        """Wait until runs end, or the process; return what they showed."""
        piece = os.read(self.pipe, 1 << 20) if select.select([self.pipe], [], [], PATIENCE)[0] else b""
        *lines, self._data = (self._data + piece).split(b"\n")
        outcomes = [Outcome(**json.loads(line)) for line in lines]
        for outcome in outcomes:
            self.left.remove(outcome.seed)
            outcome.changes = {int(step): task for step, task in outcome.changes.items()}
            self._has_failed = bool(outcome.problem)
        if not piece:
            ended = self.stop()
            if self.left and not self._has_failed:
                outcomes.append(Outcome(self.left.pop(0), f"the process ended {ended} and reported nothing"))
        return outcomes

    _has_failed = False

    def first(self) -> Outcome:
        """Wait for the end of the process; return what its first run showed."""
        outcomes = list[Outcome]()
        while not self.is_over:
            outcomes += self.ended()
        return outcomes[0]

    def stop(self) -> str:
        """Kill the process, if it has not ended, and remove the files of its runs; return how it has ended."""
        self.is_over = True
        os.close(self.pipe)
        os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        for folder in _BASE.glob(f"simulated-{self._child}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        return f"by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"with {status}"


def outcomes(
    seeds: Sequence[int], *, jobs: int = 1, whole: bool = False, before: Before | None = None
) -> Iterator[Outcome]:
    """Run seeds, in several processes at a time; yield what they showed as they end."""
    size = min(BATCH, -(-len(seeds) // jobs), len({*seeds}))  # a seed again would meet what its first run left
    batches = deque(seeds[at : at + size] for at in range(0, len(seeds), size))
    running = dict[int, Runs]()
    try:
        while batches or running:
            for slot in sorted({*range(jobs)} - running.keys())[: len(batches)]:
                running[slot] = Runs(batches.popleft(), whole=whole, before=before, slot=slot)
            pipes = {runs.pipe: slot for slot, runs in running.items()}
            for pipe in select.select(pipes, [], [], PATIENCE)[0] or [min(pipes)]:
                runs = running[pipes[pipe]]
                yield from runs.ended()
                if runs.is_over:
                    del running[pipes[pipe]]
                    batches.extendleft([runs.left] if runs.left else [])
    finally:  # the caller may have seen enough
        for runs in running.values():
            runs.stop()


def shortened(outcome: Outcome, most: int = 200, before: Before | None = None) -> Outcome:
    """Return a run of this seed that fails with fewer changes of the task: delta debugging, at most ``most`` runs."""
    best, parts, runs = outcome, 2, 0
    while runs < most and best.changes:
        steps = sorted(best.changes)
        size = max(len(steps) // parts, 1)
        for at in range(0, len(steps), size):
            kept = {step: best.changes[step] for step in steps if step not in steps[at : at + size]}
            tried = Runs([best.seed], kept, before=before).first()
            runs += 1
            if tried.problem and len(tried.changes) < len(best.changes):
                best, parts = tried, max(parts - 1, 2)
                break
            if runs >= most:
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(steps))
    return best
