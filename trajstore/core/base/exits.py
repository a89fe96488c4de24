"""Flushes and closes open stores when the interpreter exits.

The interpreter exits in this order: hooks of ``threading`` (thread pools stop, and with them zarr's compression), the
end of all non-daemon threads, hooks of ``atexit``, the last registered first (zarr stops its event loop).
So stores are flushed first of all, while everything works, and closed before zarr stops.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook must run after ours, which is registered later
import logging
import threading
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


_open: dict[int, Writer] = {}


def remember(writer: Writer) -> None:
    """Close this writer at exit, unless :func:`forget` is called before."""
    _open[id(writer)] = writer


def forget(writer: Writer) -> None:
    """Do not close this writer at exit."""
    _open.pop(id(writer), None)


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


before_the_end(_flush_all)
atexit.register(_close_all)
