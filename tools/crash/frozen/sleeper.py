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

from tools.crash.child import User
from tools.crash.journal import Journal
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore._core.writing import commit_log
from trajstore.remote import lock as remote_lock
from trajstore.remote.object_store import ObjectStore

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


class Writer(User):
    """Uses a store of its own, or one of others."""

    weights = {  # noqa: RUF012
        **{"commit": 3, "evict": 1, "pin": 1, "unpin": 1},
        **{"point": 2, "back": 1, "compact": 1, "annotate": 2},
    }

    def open(self, url: str, options: dict[str, Any]) -> None:
        """Open a store so that its index is written often and its lock is lost soon."""
        commit_log.LOG_BYTES = 1 << 12
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=url,
            sample_window_size=0,
            storage_options={**options, "lock_ttl": LOCK_TTL},
            writer=WriterOptions(threads=2, commit_interval=0.005),
        )

    def commit(self) -> None:
        self.add()
        self.flush()

    def pin(self) -> None:
        self.buffer.points.pin(f"pin-{self.chance.randrange(2)}")

    def unpin(self) -> None:
        self.buffer.points.remove(f"pin-{self.chance.randrange(2)}")


def sleep_and_go_on(url: str, options: dict[str, Any], journal: str, seed: str, freeze: Freeze, actions: int) -> None:
    """Use a store, and stop this process once; whoever continues it sees in the journal what became of it."""
    import tools.crash.warm  # noqa: F401  # the fork server may lack it

    torch.set_num_threads(1)
    notes = Journal(Path(journal))
    _freeze_at(freeze, notes)
    try:
        writer = Writer(random.Random(seed), notes, int(seed.rpartition("/")[2]) << 20)
        writer.open(url, options)
        notes.note("opened")
        for _ in range(actions):
            writer.step()
        writer.buffer.close()
        notes.note("closed")
    except Exception as error:  # whatever it is, it is judged by who reads the journal
        notes.note("error", kind=type(error).__name__, text=str(error))
    notes.note("ended")
    os._exit(0)  # as a process that was told that it lost the store may do


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
