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
from importlib import import_module
from typing import Any

from trajstore.core.base import locks
from trajstore.core.base.interrupts import start_thread, uninterrupted

LOADING_THREAD = "trajstore-load"
"""Name of the thread that loads what is going to be needed."""


class MachineCode:
    """What a module that numba compiles has, as attributes; the module is imported when one is first asked for.

    Args:
        module: its full name.
    """

    _lock = locks.rlock("MachineCode._lock")

    def __init__(self, module: str) -> None:
        self._module = module
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        uninterrupted(self._load)
        if name not in self.__dict__:
            raise AttributeError(f"{self._module} has no {name}")
        return self.__dict__[name]

    def begin(self) -> None:
        """Begin to load the module, which goes on in the background; the process does not end in the midst of it."""
        if not self._begun:
            self._begun = True
            # Without it, the first use loads: the interpreter is ending, or there is no memory for a thread.
            with suppress(RuntimeError):
                start_thread(threading.Thread(target=self._load, name=LOADING_THREAD))

    def _load(self) -> None:
        with self._lock:
            functions = vars(import_module(self._module))
            self.__dict__.update({name: functions[name] for name in functions if not name.startswith("_")})


# A child that is forked while a thread loads would have modules that nobody loads to their end.
os.register_at_fork(
    before=MachineCode._lock.acquire,
    after_in_parent=MachineCode._lock.release,
    after_in_child=MachineCode._lock.release,
)

kernels = MachineCode("trajstore.core.base._kernels")
"""Kernels that move rows; a buffer begins to load them, so that the first add or sample hardly waits."""

tree_kernels = MachineCode("trajstore.core.sampling._tree_kernels")
"""Kernels that search sum trees and compute orders."""
