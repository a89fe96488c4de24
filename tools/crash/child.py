"""The process that is killed or interrupted: it uses a store at random and notes its promises."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import random
import resource
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import ClassVar

import torch

from tests.support.witness import check_batch, check_trajectory, witness
from tools.crash.journal import Journal
from trajstore import TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.base.interrupts import CHANGE_THREAD
from trajstore._core.writing import commit_log

DESCRIPTORS = 256
"""Open files that a child may have."""
FORMATS = ("pt", "zarr", "pkl")
WAYS = ("leave", "close", "go on")
"""An interrupted child's next act, by its number."""
_KEEP = 48  # trajectories that stay in the store
_KEYS_PER_CHILD = 1 << 20
_STEPS_AFTER = 6
_STARTING = 5.0  # seconds


class _Interrupt:
    """Raises KeyboardInterrupt once, and remembers it, as code in a destructor may swallow it."""

    came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.came:
            self.came = True
            raise KeyboardInterrupt


def work(folder: Path, number: int, seed: int) -> None:
    """Use ``folder/store`` until killed or interrupted; then continue by ``WAYS``.

    Its files in ``folder`` have its number: ``journal``, whose creation tells the parent that it has begun, ``error``
    for an exception that it should not have met, and ``stacks``, written on SIGUSR1.
    """
    import tools.crash.warm  # noqa: F401  # interrupted, an import leaves half a module; the fork server may lack it

    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    torch.set_num_threads(1)
    commit_log.LOG_BYTES = 1 << 15  # so that kills while the index is written are frequent
    stacks = (folder / f"stacks_{number}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    child = _Child(folder, number, random.Random(f"{seed}/{number}"))
    try:
        with suppress(KeyboardInterrupt):
            child.open()
            while not interrupt.came:
                child.step()
        interrupt.came = True
        child.end(WAYS[number % len(WAYS)])
        atexit._run_exitfuncs()  # processes of multiprocessing do without
    except Exception as error:  # the parent reports it, whatever it is
        (folder / f"error_{number}").write_text(f"{type(error).__name__}: {error}")
        raise


class _Child:
    buffer: TrajectoryReplayBuffer
    weights: ClassVar[Mapping[str, int]] = {
        **{"add": 40, "flush": 20, "evict": 10, "sample": 8, "pin": 8, "annotate": 12, "checkpoint": 4, "reopen": 3}
    }
    """How often each method is called."""

    def __init__(self, folder: Path, number: int, chance: random.Random) -> None:
        self.folder, self.number, self.chance = folder, number, chance
        self.next_key = number * _KEYS_PER_CHILD
        self.keys: dict[int, int] = {}
        """Of the trajectories in the store, by id."""
        self.opened = False
        self.journal = Journal(folder / f"journal_{number}")

    def some(self) -> list[int]:
        """Return one to three ids, or all of fewer."""
        return sorted(self.chance.sample([*self.keys], min(len(self.keys), self.chance.randint(1, 3))))

    def step(self) -> None:
        (name,) = self.chance.choices([*self.weights], weights=[*self.weights.values()])
        getattr(self, name)()

    def open(self) -> None:
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=self.folder / "store",
            trajectory_format=FORMATS[self.number % len(FORMATS)],
            sample_window_size=0,
            writer=WriterOptions(threads=2, commit_interval=0.005, shard_bytes=1 << 16),
        )
        self.opened = True
        self.look()

    def look(self) -> None:
        """Read the whole store; each trajectory must match its key."""
        self.keys = {
            number: check_trajectory(self.buffer.get(number)) for number in self.buffer.trajectory_ids.tolist()
        }

    def add(self) -> None:
        keys = range(self.next_key, self.next_key + self.chance.randint(1, 6))
        self.next_key = keys.stop
        self.keys |= zip(self.buffer.add_trajectories([witness(key) for key in keys]), keys, strict=True)

    def flush(self) -> None:
        self.buffer.flush()
        self.journal.note("flushed", keys=[*self.keys.items()])

    def evict(self) -> None:
        chosen = {*[*self.keys][:-_KEEP], *self.some()}
        self.journal.note("evicting", ids=[*chosen])
        self.keys = {number: key for number, key in self.keys.items() if number not in chosen}
        self.buffer.evict(sorted(chosen))

    def annotate(self) -> None:
        """Annotate as the writer or through the inbox."""
        self.flush()
        if chosen := self.some():
            annotate(self.chance.choice((self.buffer, self.folder / "store")), chosen, {"v": self.next_key})

    def sample(self) -> None:
        """Sample as the writer and as a reader."""
        if self.keys:
            self.buffer.clear_cache()
            check_batch(self.buffer.sample(64))
        with TrajectoryReplayBuffer.open(self.folder / "store") as reader:
            if len(reader):
                check_batch(reader.sample(16))

    def pin(self) -> None:
        """Pin the contents, or remove the pin."""
        pins = [path.stem for path in (self.folder / "store" / "pins").glob("*.json")]
        if pins:
            self.buffer.points.remove(pins[0])
        else:
            self.buffer.points.pin("pin")

    def checkpoint(self) -> None:
        self.flush()
        self.buffer.save_checkpoint(self.folder / "checkpoint")

    def reopen(self) -> None:
        self.opened = False
        self.buffer.close()
        self.open()

    def end(self, way: str) -> None:
        """Leave the store, close it or continue after an interrupt."""
        if way == "leave":
            return
        for thread in threading.enumerate():
            if thread.name == CHANGE_THREAD:
                _join(thread)  # continues an interrupted eviction
        if not self.opened:
            if hasattr(self, "buffer"):
                self.buffer.close()  # closing may have been interrupted
            gc.collect()  # a half-built buffer
            self.open()
        if way == "go on":
            self.look()
            for _ in range(_STEPS_AFTER):
                self.step()
            self.flush()
        self.buffer.close()


def _join(thread: threading.Thread) -> None:
    """Join a thread; one whose start was interrupted begins within moments, or never."""
    until = time.monotonic() + _STARTING
    while time.monotonic() < until:
        try:
            thread.join()
        except RuntimeError:  # it has not begun
            time.sleep(0.01)
        else:
            return
