"""The modules that numba compiles, loaded where no signal comes.

An exception that a signal handler raises (Ctrl-C) in the midst of importing numba, or of compiling, would leave numba
unusable for the rest of the process. Python runs signal handlers in the main thread only, so another thread loads and
compiles, to its end; whoever waits for it can be interrupted, and waits again with the next call. Importing numba takes
a while, so nothing is loaded before it is needed.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from typing import Any

from trajstore import locks
from trajstore.interrupts import uninterrupted


class MachineCode:
    """Modules that numba compiles while they are imported, by name."""

    def __init__(self) -> None:
        self._ready: dict[str, Any] = {}
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

    def _load(self, name: str) -> None:
        with self._lock:
            self._ready[name] = import_module(name)


_machine_code = MachineCode()


def kernels() -> Any:
    """Return the module of kernels that move rows."""
    return _machine_code.get("trajstore._kernels")


def tree_kernels() -> Any:
    """Return the module of kernels that search sum trees."""
    return _machine_code.get("trajstore.sampling._tree_kernels")
