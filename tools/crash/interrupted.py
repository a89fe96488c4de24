"""The process that is interrupted (Ctrl-C): it leaves, closes the store, or goes on with it."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import random
import resource
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from tools.crash.child import Child
from tools.crash.journal import Journal
from trajstore._core.base.interrupts import CHANGE_THREAD

DESCRIPTORS = 256
"""That a child may have open."""
WAYS = ("leave", "close", "go on")
_STEPS_AFTER = 6
_STARTING = 5.0  # seconds


def error_file(folder: Path, number: int) -> Path:
    """Return where a child writes what it should not have met."""
    return folder / f"error_{number:06d}"


def stacks_file(folder: Path, number: int) -> Path:
    """Return where a child that hangs is made to write where it is."""
    return folder / f"stacks_{number:06d}"


class _Interrupt:
    """Raises KeyboardInterrupt once; code that runs in a destructor may swallow it, so that it is remembered too."""

    came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.came:
            self.came = True
            raise KeyboardInterrupt


def work(folder: str, number: int, seed: int) -> None:
    """Use the store in ``folder`` until interrupted, and then as the children's numbers say."""
    import tools.crash.warm  # noqa: F401  # interrupted, an import leaves half a module; the fork server may lack it

    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    torch.set_num_threads(1)
    stacks = stacks_file(Path(folder), number).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    chance = random.Random(f"{seed}/{number}")
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    journal = Journal(Path(folder) / f"journal_{number:06d}")  # tells the parent that it may interrupt
    try:
        child = _until(Path(folder), number, chance, journal, interrupt)
        if child is not None:
            _afterwards(child, WAYS[number % len(WAYS)])
        atexit._run_exitfuncs()  # processes of multiprocessing do without
    except Exception as error:  # whatever it is, the parent must hear of it
        error_file(Path(folder), number).write_text(f"{type(error).__name__}: {error}")
        raise


def _until(folder: Path, number: int, chance: random.Random, journal: Journal, interrupt: _Interrupt) -> Child | None:
    child = None
    try:
        child = Child(folder, number, chance, journal)
        child.open()
        while not interrupt.came:
            child.step()
    except KeyboardInterrupt:
        pass
    interrupt.came = True
    return child


def _join(thread: threading.Thread) -> None:
    """Wait for a thread; one that an interrupt met while it was being started begins within moments, or never."""
    until = time.monotonic() + _STARTING
    while time.monotonic() < until:
        try:
            thread.join()
        except RuntimeError:  # it has not begun
            time.sleep(0.01)
        else:
            return


def _afterwards(child: Child, way: str) -> None:
    if way == "leave":
        return
    for thread in threading.enumerate():
        if thread.name == CHANGE_THREAD:
            _join(thread)  # an eviction that was interrupted goes on; until its end what it takes may go at any moment
    if not child.opened:
        if hasattr(child, "buffer"):
            child.buffer.close()  # closing may have been interrupted
        gc.collect()  # what was being made when the interrupt came
        child.open()
    if way == "go on":
        child.buffer.flush()  # until then retention may act at any moment
        child.look()
        for _ in range(_STEPS_AFTER):
            child.step()
        child.flush()
    child.buffer.close()
