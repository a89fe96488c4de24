"""The modules that numba compiles, loaded where no signal comes.

An exception that a signal handler raises (Ctrl-C) in the midst of importing numba, or of compiling, would leave numba
unusable for the rest of the process. Python runs signal handlers in the main thread only, so another thread loads and
compiles, to its end; whoever waits for it can be interrupted, and waits again with the next call. Importing numba takes
a while, so nothing is loaded before it is needed.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from trajstore.core.base import locks
from trajstore.core.base.interrupts import start_thread, uninterrupted

LOADING_THREAD = "trajstore-load"
"""Name of the thread that loads what is going to be needed."""


class MachineCode:
    """Modules that numba compiles while they are imported, by name."""

    def __init__(self) -> None:
        self._ready: dict[str, Any] = {}
        self._begun: set[str] = set()
        self._lock = locks.rlock("MachineCode._lock")
        # A child that is forked while a thread loads would have modules that nobody loads to their end.
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._lock.release
        )

    def get(self, name: str) -> Any:
        """Return a module, loaded by now."""
        module = self._ready.get(name)
        if module is None:
            uninterrupted(partial(self._load, name))
            module = self._ready[name]
        return module

    def begin(self, name: str) -> None:
        """Begin to load a module, which goes on in the background; the process does not end in the midst of it."""
        if name not in self._begun:
            self._begun.add(name)
            # Without it, the first `get` loads: the interpreter is ending, or there is no memory for a thread.
            with suppress(RuntimeError):
                start_thread(threading.Thread(target=self._load, args=(name,), name=LOADING_THREAD))

    def _load(self, name: str) -> None:
        with self._lock:
            self._ready[name] = import_module(name)


_machine_code = MachineCode()


def kernels() -> Any:
    """Return the module of kernels that move rows."""
    return _machine_code.get("trajstore.core.base._kernels")


def begin_kernels() -> None:
    """Begin to load the kernels that move rows, so that the first add or sample hardly waits for them."""
    _machine_code.begin("trajstore.core.base._kernels")


def tree_kernels() -> Any:
    """Return the module of kernels that search sum trees and compute orders."""
    return _machine_code.get("trajstore.core.sampling._tree_kernels")
