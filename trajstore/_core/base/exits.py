"""Stops threads, and flushes and closes open stores, when the interpreter exits.

The interpreter exits in this order: hooks of ``threading`` (thread pools stop, and with them zarr's compression), the
end of all non-daemon threads, hooks of ``atexit``, the last registered first (zarr stops its event loop).
So stores are flushed first of all, while everything works, and closed before zarr stops.

Python ends daemon threads by force, which aborts the process if one is in C++ or Rust code then. So threads that read
are stopped before, but after the end of non-daemon threads, which may still use their batches.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook must run after ours, which is registered later
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """An object to flush and close at exit."""

    def flush(self) -> None:
        """Write everything."""

    def close(self) -> None:
        """Write everything and release the directory."""

    @property
    def closed(self) -> bool:
        """Whether it is closed already."""


class Stoppable(Protocol):
    """An object with a thread."""

    def stop_and_wait(self) -> None:
        """Stop the thread and wait for its end."""


_open: dict[int, Writer] = {}
_threads = weakref.WeakSet[Stoppable]()


def remember(writer: Writer) -> None:
    """Close this writer at exit, unless :func:`forget` is called before."""
    _open[id(writer)] = writer


def forget(writer: Writer) -> None:
    """Do not close this writer at exit."""
    _open.pop(id(writer), None)


def stop_at_exit(thread: Stoppable) -> None:
    """Stop a thread at exit, unless it is garbage-collected or forked before."""
    _threads.add(thread)


def before_the_end(call: Callable[[], None]) -> None:
    """Run a callable at exit while everything still works, before stores are flushed."""
    getattr(threading, "_register_atexit", atexit.register)(call)


def close_before_what_was_imported_now() -> None:
    """Close stores before the ``atexit`` hooks that are registered by now."""
    atexit.register(_close_all)


def _flush_all() -> None:
    for writer in list(_open.values()):
        if not writer.closed:
            _quietly(writer.flush)


def _close_all() -> None:
    for thread in list(_threads):
        _quietly(thread.stop_and_wait)
    for writer in list(_open.values()):
        if not writer.closed:
            _quietly(writer.close)
        forget(writer)


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except KeyboardInterrupt:
        logger.error("interrupted while what was added was being written; some of it may be lost")
    except Exception as error:  # at exit no caller is left to raise it to
        logger.error("%s", error)


os.register_at_fork(after_in_child=_threads.clear)
before_the_end(_flush_all)
atexit.register(_close_all)
