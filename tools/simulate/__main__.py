"""Command line: ``python -m tools.simulate --seed 0 --runs 2000``, or ``--seed N --trace`` to see one run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.simulate.world import Outcome


def main() -> int:
    """Run seeds; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many at a time")
    parser.add_argument("--repeat", type=int, default=1, help="run each seed so often; a run that differs fails")
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--shorten", action="store_true", help="leave changes of the thread out of a failing run")
    parser.add_argument("--fault", default="", help="break the store by a known fault (tests/simulation/faults.py)")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts, which a running process cannot change
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tools.simulate", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    import tools.crash.warm  # noqa: F401  # loads everything, so that a run is a fork
    from tools.simulate.runs import outcomes, shortened

    before = None
    if arguments.fault:
        from tests.simulation.faults import FAULTS

        known = {fault.name: fault for fault in FAULTS}
        if arguments.fault not in known:
            parser.error(f"--fault {arguments.fault!r}: not one of {', '.join(known)}")
        before = known[arguments.fault].put_in
    begun, steps, runs, failed, digests = time.monotonic(), 0, 0, list[int](), dict[int, str]()
    seeds = [*range(arguments.seed, arguments.seed + arguments.runs)] * arguments.repeat
    for outcome in outcomes(seeds, jobs=arguments.jobs, whole=arguments.trace, before=before):
        runs, steps = runs + 1, steps + outcome.steps
        if digests.setdefault(outcome.seed, outcome.digest) != outcome.digest:
            outcome.problem = outcome.problem or "the same seed gives the same steps: they differ"
        if outcome.problem:
            failed.append(outcome.seed)
            if arguments.shorten:
                outcome = shortened(outcome, before=before)
        if not arguments.json:
            _report(outcome, trace=arguments.trace)
        if failed and arguments.until_failure:
            break
    seconds = time.monotonic() - begun
    report = {"runs": runs, "steps": steps, "failed": failed, "seconds": round(seconds, 1), "digests": digests}
    summary = (
        f"{runs} runs, {steps} steps, {len(failed)} failed {failed[:20]}, {seconds:.1f} s, {runs / seconds:.1f} runs/s"
    )
    sys.stdout.write((json.dumps(report) if arguments.json else summary) + "\n")
    return bool(failed)


_FEW = 100


def _report(outcome: Outcome, *, trace: bool) -> None:
    if trace or outcome.problem:
        steps = outcome.trace if trace else outcome.trace[-40:]
        sys.stdout.writelines(f"{number:6} {task:28} {what}\n" for number, task, what in steps)
    if outcome.problem:
        sys.stdout.write(f"seed {outcome.seed}: {outcome.problem}\n{outcome.plan}\n")
        few = outcome.changes if len(outcome.changes) < _FEW else "too many to show; --shorten leaves some out"
        sys.stdout.write(f"{len(outcome.changes)} changes of the thread: {few}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
