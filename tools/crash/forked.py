"""Children that are at work at once: forked from a server that has loaded everything that they need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_LOADED = ["tools.crash.warm"]


def forking() -> ForkServerContext:
    """Return the context in which to start children.

    A process has one fork server, which loads what it was told before its first child; so everybody has to get the
    context here. Where somebody else has started the server, or it does not find the module, children are slower and
    else the same: one that must not be disturbed while it loads imports ``tools.crash.warm`` itself before it says that
    it is ready.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context
