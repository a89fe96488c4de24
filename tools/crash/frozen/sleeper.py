"""The writer that is frozen: it uses a store in an object store until it is stopped in the midst of a request."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tools.crash.journal import Journal
from trajstore import TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore.files import remote_lock
from trajstore.files.object_store import ObjectStore
from trajstore.testing.witness import witness

REQUESTS = ("create", "put", "put_if", "delete", "delete_if", "stamped", "version", "read", "probe")
"""Calls around which a writer is frozen."""

LOCK_TTL = 1.0


@dataclass(frozen=True)
class Freeze:
    """When a writer is frozen.

    Attributes:
        request: number of the request, counted from when it has taken the lock.
        side: before the request is sent, or after its answer came and before anybody knows it.
        clock: ``"stands"``: afterwards this process believes that no time has passed, as in a virtual machine that was
            paused; ``"runs"``: it knows.
    """

    request: int
    side: Literal["before", "after"]
    clock: Literal["stands", "runs"]


def open_store(url: str, options: dict[str, Any]) -> TrajectoryReplayBuffer:
    """Open a store for writing, so that it writes its index often and loses its lock soon."""
    return TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=url,
        sample_window_size=0,
        storage_options={**options, "lock_ttl": LOCK_TTL},
        writer=WriterOptions(threads=2, commit_interval=0.005, snapshot_bytes=1 << 12),
    )


def sleep_and_go_on(url: str, options: dict[str, Any], journal: str, seed: str, freeze: Freeze, actions: int) -> None:
    """Use a store, and stop this process once; whoever continues it sees in the journal what became of it."""
    import tools.crash.warm  # noqa: F401  # the fork server may lack it

    torch.set_num_threads(1)
    notes = Journal(Path(journal))
    _freeze_at(freeze, notes)
    try:
        use(open_store(url, options), notes, random.Random(seed), int(seed.rpartition("/")[2]) << 20, actions)
    except Exception as error:  # whatever it is, it is judged by who reads the journal
        notes.note("error", kind=type(error).__name__, text=str(error))
    notes.note("ended")
    os._exit(0)  # as a process that was told that it lost the store may do


def use(buffer: TrajectoryReplayBuffer, notes: Journal, chance: random.Random, key: int, actions: int) -> None:
    """Add, evict, pin, save and go back, and note what was acknowledged."""
    notes.note("opened")
    keys: dict[int, int] = {}
    points: dict[int, set[int]] = {}
    for number in range(actions):
        what = chance.choice(
            ("add", "add", "add", "evict", "pin", "unpin", "point", "point", "back", "compact", "annotate", "annotate")
        )
        if what == "add":
            new = [key + number * 8 + offset for offset in range(chance.randint(1, 4))]
            keys |= dict(zip(buffer.add_trajectories([witness(one) for one in new]), new, strict=True))
            buffer.flush()
            notes.note("flushed", keys={str(one): value for one, value in keys.items()})
        elif what == "evict" and len(buffer):
            ids = chance.sample(buffer.trajectory_ids.tolist(), min(2, len(buffer)))
            notes.note("evicting", ids=ids)
            buffer.evict(ids)
        elif what == "annotate" and len(buffer):
            ids = chance.sample(buffer.trajectory_ids.tolist(), min(2, len(buffer)))
            give(buffer, ids, key + number)
            notes.note("annotated", ids=ids, value=key + number)
        elif what == "pin":
            buffer.points.pin(f"pin-{chance.randrange(2)}")
        elif what == "unpin":
            buffer.points.unpin(f"pin-{chance.randrange(2)}")
        elif what == "point":
            step = max([point.step for point in buffer.points.saved], default=0) + chance.randrange(2)
            notes.note("saving")
            buffer.points.save(step, keep=2)
            points[step] = set(buffer.trajectory_ids.tolist())
            notes.note("saved", steps=[point.step for point in buffer.points.saved])
        elif what == "back":
            steps = [point.step for point in buffer.points.saved]
            if own := [step for step in steps if step in points]:
                step = chance.choice(own)
                leaving = set(buffer.trajectory_ids.tolist()) - points[step]
                notes.note("evicting", ids=sorted(leaving))
                notes.note("going_back", ids=sorted(leaving), later=[one for one in steps if one > step])
                buffer.points.rollback(step, aside=chance.random() < 0.5)
                notes.note("went_back", steps=[point.step for point in buffer.points.saved])
        else:
            buffer.compact()
    buffer.close()
    notes.note("closed")


def give(buffer: TrajectoryReplayBuffer, ids: list[int], value: int) -> None:
    """Give trajectories a value, and by row too, in the same call: both are there, or neither."""
    shapes = [buffer.get(number).rewards.shape[:2] for number in ids]
    rows = [torch.full(shape, value, dtype=torch.float64) for shape in shapes]
    annotate(buffer, ids, {"value": float(value), "rows": rows})


def _freeze_at(freeze: Freeze, notes: Journal) -> None:
    counted: int | None = None
    mutex = threading.Lock()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal counted
            with mutex:
                if name == "probe":  # it has the lock
                    counted = 0
                number = counted
                counted = None if counted is None else counted + 1
            if number == freeze.request and freeze.side == "before":
                _stop(freeze, notes, name, arguments[1])
            try:
                return real(*arguments, **keywords)
            finally:
                if number == freeze.request and freeze.side == "after":
                    _stop(freeze, notes, name, arguments[1])

        return call

    for name in REQUESTS:
        setattr(ObjectStore, name, counting(name, getattr(ObjectStore, name)))


def _stop(freeze: Freeze, notes: Journal, request: str, name: str) -> None:
    notes.note("freezing", request=request, name=name)
    real, begun = remote_lock.now, remote_lock.now()
    os.kill(os.getpid(), signal.SIGSTOP)
    if freeze.clock == "stands":
        slept = real() - begun
        remote_lock.now = lambda: real() - slept
    notes.note("awake")
