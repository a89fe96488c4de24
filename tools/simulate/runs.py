"""Runs of seeds, each in a process forked from one that has loaded everything; a failing schedule made short."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Mapping

from tools.simulate.world import Outcome, World

PATIENCE = 120.0
"""Seconds of real time that a run may take: only a wait that the simulator does not see takes long."""


def run(
    seed: int,
    changes: Mapping[int, str] | None = None,
    *,
    whole: bool = False,
    before: Callable[[], object] | None = None,
) -> Outcome:
    """Run one seed.

    Args:
        seed: decides everything.
        changes: those of an earlier run, to repeat.
        whole: keep the whole trace.
        before: called in the process first, for example to break something.
    """
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(mine)
        if before is not None:
            before()
        World(seed, theirs, changes, whole=whole).run()
    os.close(theirs)
    data = bytearray()
    while True:
        if not select.select([mine], [], [], PATIENCE)[0]:
            os.kill(child, signal.SIGKILL)
            break
        piece = os.read(mine, 1 << 20)
        if not piece:
            break
        data += piece
    os.close(mine)
    _, status = os.waitpid(child, 0)
    if not data:
        return Outcome(
            seed,
            f"the process ended with {status} and reported nothing"
            if not os.WIFSIGNALED(status)
            else f"the process ended by {signal.Signals(os.WTERMSIG(status)).name}",
        )
    fields = json.loads(data)
    fields["changes"] = {int(step): task for step, task in fields["changes"].items()}
    return Outcome(**fields)


def shortened(outcome: Outcome, most: int = 200, before: Callable[[], object] | None = None) -> Outcome:
    """Return a run of this seed that fails with fewer changes of the task: delta debugging, at most ``most`` runs."""
    best, parts, runs = outcome, 2, 0
    while runs < most and best.changes:
        steps = sorted(best.changes)
        size = max(len(steps) // parts, 1)
        for at in range(0, len(steps), size):
            kept = {step: best.changes[step] for step in steps if step not in steps[at : at + size]}
            tried = run(best.seed, kept, before=before)
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
