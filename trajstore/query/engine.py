"""Lazy import of Polars, the query engine."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trajstore.errors import ConfigurationError, MissingDependencyError

__all__ = ["pl", "polars"]

_users: list[int] = []
"""The process that used Polars first."""


def polars() -> ModuleType:
    """Return Polars.

    Raises:
        MissingDependencyError: Polars is not installed, or is older than version 2, whose scan interface differs.
        ConfigurationError: the process was forked after Polars was used: its threads are absent here.
    """
    try:
        import polars
    except ImportError:
        raise MissingDependencyError("polars", "query") from None
    if int(polars.__version__.partition(".")[0]) < 2:
        raise MissingDependencyError("polars>=2", "query")
    _users[:] = _users or [os.getpid()]
    if _users[0] != os.getpid():
        raise ConfigurationError(
            "queries and where= do not work in a process that was forked after one was used, because Polars' threads "
            "do not survive a fork; start it with the method 'spawn' (DataLoader: multiprocessing_context='spawn')"
        )
    return polars


class _Polars:
    """Polars, imported where it is first used; raises the errors of :func:`polars`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(polars(), name)


if TYPE_CHECKING:
    import polars as pl
else:
    pl = _Polars()
