"""Imports numba modules in a thread that receives no signals.

An exception from a signal handler (Ctrl-C) during numba's import or compilation would leave numba unusable for the
rest of the process. Python runs signal handlers in the main thread only, so another thread loads and compiles. A
caller that waits for it can be interrupted, and waits again with the next call. Importing numba is slow, so modules
are loaded on first use.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

from trajstore._core.base import locks
from trajstore._core.base.interrupts import start_thread, uninterrupted

LOADING_THREAD = "trajstore-load"
"""Name of the loading thread."""


class MachineCode:
    """Attributes of a numba module, which is imported on first access.

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
        """Start loading the module in the background; the process does not exit before it has loaded."""
        if not self._begun:
            self._begun = True
            # On failure the first use loads it: the interpreter is exiting, or there is no memory for a thread.
            with suppress(RuntimeError):
                start_thread(threading.Thread(target=self._load, name=LOADING_THREAD))

    def _load(self) -> None:
        with self._lock:
            functions = vars(import_module(self._module))
            self.__dict__.update({name: functions[name] for name in functions if not name.startswith("_")})


# A child that is forked while a thread loads would have half-loaded modules.
os.register_at_fork(
    before=MachineCode._lock.acquire,
    after_in_parent=MachineCode._lock.release,
    after_in_child=MachineCode._lock.release,
)

kernels = MachineCode("trajstore._core.base._kernels")
"""Kernels that move rows; a buffer starts to load them, so that the first add or sample hardly waits."""

tree_kernels = MachineCode("trajstore._core.sampling._tree_kernels")
"""Kernels that search sum trees and compute orders."""

packing_kernels = MachineCode("trajstore._core.base._packing_kernels")
"""Kernels that pack the columns of rollouts, and copy rows out of them."""
