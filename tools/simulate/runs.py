"""Runs of seeds, each in a process forked from one that has loaded everything; a failing schedule made short."""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping

from tools.simulate.world import Outcome, World

PATIENCE = 120.0
"""Seconds of real time that a run may take: only a wait that the simulator does not see takes long."""


Before = Callable[[], object]
"""Called in the process of a run first, for example to break something."""


class Started:
    """A run under way in a process of its own.

    Args:
        seed: decides everything.
        changes: those of an earlier run, to repeat.
        whole: keep the whole trace.
        before: called in the process first.
        slot: number of the run among those at the same time; decides the core.
    """

    def __init__(
        self,
        seed: int,
        changes: Mapping[int, str] | None = None,
        *,
        whole: bool = False,
        before: Before | None = None,
        slot: int = 0,
    ) -> None:
        self.seed = seed
        self.pipe, theirs = os.pipe()
        self._child = os.fork()
        if not self._child:
            try:
                os.close(self.pipe)
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[slot % len(cores)]})  # threads that take turns use one core
                if before is not None:
                    before()
                World(seed, theirs, changes, whole=whole).run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs)
        self._data = bytearray()

    def has_ended(self) -> bool:
        """Read its report, once there is something to read; return True at the end."""
        piece = os.read(self.pipe, 1 << 20)
        self._data += piece
        return not piece

    def outcome(self) -> Outcome:
        """Wait for its end."""
        while select.select([self.pipe], [], [], PATIENCE)[0]:
            if self.has_ended():
                break
        else:
            os.kill(self._child, signal.SIGKILL)
        os.close(self.pipe)
        _, status = os.waitpid(self._child, 0)
        if not self._data:
            signaled = os.WIFSIGNALED(status)
            ended = f"by {signal.Signals(os.WTERMSIG(status)).name}" if signaled else f"with {status}"
            return Outcome(self.seed, f"the process ended {ended} and reported nothing")
        fields = json.loads(self._data)
        fields["changes"] = {int(step): task for step, task in fields["changes"].items()}
        return Outcome(**fields)


def outcomes(
    seeds: Iterable[int], *, jobs: int = 1, whole: bool = False, before: Before | None = None
) -> Iterator[Outcome]:
    """Run seeds, several at a time; yield what they showed as they end."""
    left, running = iter(seeds), dict[int, Started]()
    try:
        while True:
            for slot, seed in zip(sorted({*range(jobs)} - running.keys()), left, strict=False):
                running[slot] = Started(seed, whole=whole, before=before, slot=slot)
            if not running:
                return
            pipes = {started.pipe: slot for slot, started in running.items()}
            ready, _, _ = select.select(pipes, [], [], PATIENCE)
            for pipe in ready or [min(pipes)]:
                if not ready or running[pipes[pipe]].has_ended():
                    yield running.pop(pipes[pipe]).outcome()
    finally:  # the caller has seen enough, but runs remove their folders
        for started in running.values():
            started.outcome()


def shortened(outcome: Outcome, most: int = 200, before: Before | None = None) -> Outcome:
    """Return a run of this seed that fails with fewer changes of the task: delta debugging, at most ``most`` runs."""
    best, parts, runs = outcome, 2, 0
    while runs < most and best.changes:
        steps = sorted(best.changes)
        size = max(len(steps) // parts, 1)
        for at in range(0, len(steps), size):
            kept = {step: best.changes[step] for step in steps if step not in steps[at : at + size]}
            tried = Started(best.seed, kept, before=before).outcome()
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
