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
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError, TrajstoreError
from trajstore.testing.witness import WitnessError, check_trajectory
from trajstore.verify import verify

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

    store = folder / "store"
    present = _read(store, None, problem)
    if present is None:
        if promises.flushed:
            problem("the store is gone")
        return
    result.checked += len(present)
    result.promised += len(promises.flushed)
    for trajectory_id, key in promises.flushed.items():
        if trajectory_id in present:
            if present[trajectory_id] != key:
                problem(f"trajectory {trajectory_id} has the key {present[trajectory_id]}, {key} was flushed")
        elif not promises.gone_rightly(trajectory_id, present):
            problem(f"trajectory {trajectory_id} was flushed and is lost")
    for trajectory_id, key in present.items():
        if seen.setdefault(trajectory_id, key) != key:
            problem(f"id {trajectory_id} was given twice")
    for name, kept in list(promises.pins.items()):
        if kept is None:
            del promises.pins[name]  # the child died in between: both are right
        elif (pinned := _read(store, name, problem)) != kept:
            problem(f"pin {name} holds {pinned}, not {kept}")
    for trouble in verify(store).problems:
        problem(f"{trouble.file}: {trouble.message}")
    if promises.checkpoints:
        if _read(folder / "checkpoint", None, problem) is None:
            problem("the checkpoint is gone")
        else:
            for trouble in verify(folder / "checkpoint").problems:
                problem(f"checkpoint: {trouble.file}: {trouble.message}")
    promises.forget(present)


def _read(path: Path, pin: str | None, problem: Callable[[str], None]) -> dict[int, int] | None:
    """Return id and key of every trajectory, each compared with what its key says; None if nothing is there."""
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    try:
        buffer.load_checkpoint(path, pin=pin)
        return {number: check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist()}
    except StoreNotFoundError:
        return None
    except (TrajstoreError, WitnessError, OSError) as error:
        problem(f"{path.name}{f' (pin {pin})' if pin else ''} cannot be read: {type(error).__name__}: {error}")
        return {}
    finally:
        buffer.close()
