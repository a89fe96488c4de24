"""Kill, resume, kill: the parent's side, and the moments at which a child kills itself."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tools.campaigns import Result, start
from tools.crash.resume.loop import EVERY, Loop
from trajstore._core.files.local import LocalDirectory
from trajstore.operations.verify import verify
from trajstore.points import points_at

MOMENTS = ("between point and model", "in save_point", "in rollback", "in a step", "while the loader reads")
_CALLS = 7  # changes of the directory in a save_point, or in a rollback; the k-th of these is the last
_VERIFIED = 10  # every so many kills the store is verified whole


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_change(number: int) -> None:
    """Let the process die before the k-th change of a directory from now on."""
    left = [number]

    def counted(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                _die()
            return genuine(*arguments, **options)

        return call

    for name in ("publish", "append", "remove"):
        setattr(LocalDirectory, name, counted(getattr(LocalDirectory, name)))


def child(folder: str, moment: str, number: int, checkpoints: int) -> None:
    """Resume the loop, pass some checkpoints, and die at a moment.

    Args:
        folder: of the loop.
        moment: one of :data:`MOMENTS`.
        number: before which change of the directory, where the moment is within a call.
        checkpoints: that are passed before.
    """
    torch.set_num_threads(1)
    if moment == "in rollback":
        genuine = LocalDirectory.lock_writer

        def lock_writer(directory: LocalDirectory) -> Any:  # from the opening of the store on
            lock = genuine(directory)
            if directory.url.endswith("store"):
                _die_at_change(number)
            return lock

        setattr(LocalDirectory, "lock_writer", lock_writer)  # noqa: B010  # mypy sees no assignment to a method
    with closing(Loop(Path(folder))) as loop:
        for passed in range(checkpoints + 1):
            for _ in range(EVERY):
                loop.train_step()
                if passed == checkpoints and moment == "in a step":
                    _die()
            if passed == checkpoints and moment == "in save_point":
                _die_at_change(number)
            if passed == checkpoints and moment == "while the loader reads":
                loop.die_while_reading(_die)
            loop.save_point()
            if passed == checkpoints:
                _die()
            loop.save_model()


def run_campaign(folder: Path, kills: int, seed: int, progress: Callable[[Result], None] | None = None) -> Result:
    """Kill ``kills`` children, resume after each, and compare the whole run with one that nobody interrupted.

    Args:
        folder: empty; both runs are left in it.
        kills: how many; more than half of them between the saved point and the model's checkpoint.
        seed: of the moments.
        progress: called after each kill.
    """
    chance, result = random.Random(seed), Result()
    killed, whole = folder / "killed", folder / "whole"
    killed.mkdir()
    whole.mkdir()
    for kill in range(kills):
        moment = MOMENTS[0] if kill % 2 == 0 else MOMENTS[1 + kill // 2 % (len(MOMENTS) - 1)]
        if moment == "in rollback" and not (killed / "model.pt").exists():
            moment = MOMENTS[0]
        number, passed = chance.randint(1, _CALLS), chance.randint(0, 1)
        process = start(child, str(killed), moment, number, passed)
        process.join()
        if process.exitcode != -signal.SIGKILL:
            result.problems.append(f"kill {kill}, {moment}: exit code {process.exitcode}")
            break
        result.counts["kills"] += 1
        result.counts[f"killed {moment}"] += 1
        _look(killed, kill, moment, result)
        if progress is not None:
            progress(result)
    steps = EVERY * (2 + result.counts["step resumed at last"] // EVERY)
    for process in [start(finish, str(one), steps) for one in (killed, whole)]:
        process.join()
    ends = [torch.load(one / "model.pt") for one in (killed, whole)]
    if not ends[0]["step"] == ends[1]["step"] == steps:
        result.problems.append(f"the runs ended at steps {ends[0]['step']} and {ends[1]['step']}, not {steps}")
    differing = [
        step + 1
        for step, pair in enumerate(zip(ends[0]["digests"], ends[1]["digests"], strict=False))
        if pair[0] != pair[1]
    ]
    if differing or not torch.equal(ends[0]["weights"], ends[1]["weights"]):
        result.problems.append(f"the resumed run differs from the uninterrupted one at the steps {differing[:10]}")
    result.counts["steps compared"] = steps
    problems = verify(killed / "store").problems
    result.problems += [f"in the end: {problem}" for problem in problems]
    return result


def finish(folder: str, steps: int) -> None:
    """Resume or begin the loop, and end it at a step."""
    torch.set_num_threads(1)
    with closing(Loop(Path(folder))) as loop:
        while loop.step < steps:
            loop.train_step()
            if loop.step % EVERY == 0:
                loop.save_point()
                loop.save_model()


def _look(folder: Path, kill: int, moment: str, result: Result) -> None:
    """Check that the model that is there has its saved point."""
    if not (folder / "model.pt").exists():
        return
    step = torch.load(folder / "model.pt")["step"]
    result.counts["step resumed at last"] = max(step, result.counts["step resumed at last"])
    steps = [point.step for point in points_at(folder / "store").saved]
    if step not in steps:
        result.problems.append(f"kill {kill}, {moment}: the model is at step {step}, the store has points {steps}")
    if kill % _VERIFIED == 0:
        problems = verify(folder / "store").problems
        result.problems += [f"kill {kill}, {moment}: {problem}" for problem in problems]
