"""What happens to stores that nobody closed when the interpreter ends: everything is written.

The interpreter ends in this order: hooks of ``threading`` (thread pools stop, and with them zarr's compression), the
end of all threads that are not daemons, hooks of ``atexit``, the last registered first (zarr stops its event loop).
So stores are flushed first of all, while everything works, and closed before zarr stops.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook is to run after ours, which is registered later
import logging
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """What is to be closed."""

    def flush(self) -> None:
        """Write everything."""

    def close(self) -> None:
        """Write everything and give the directory back."""

    @property
    def closed(self) -> bool:
        """Whether there is nothing left to do."""


_open: dict[int, Writer] = {}


def remember(writer: Writer) -> None:
    """Close this one at the end, unless :func:`forget` is called before."""
    _open[id(writer)] = writer


def forget(writer: Writer) -> None:
    """Leave this one alone: it is closed."""
    _open.pop(id(writer), None)


def before_the_end(call: Callable[[], None]) -> None:
    """Call this while everything still works, before stores are flushed."""
    getattr(threading, "_register_atexit", atexit.register)(call)


def close_before_what_was_imported_now() -> None:
    """Let stores be closed before whatever has registered a hook of ``atexit`` so far does its own."""
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
    except Exception as error:  # the interpreter is ending: nobody is left to raise it to
        logger.error("%s", error)


before_the_end(_flush_all)
atexit.register(_close_all)
