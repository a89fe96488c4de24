"""Lazy import of Polars, the query engine."""

from __future__ import annotations

from types import ModuleType

from trajstore.errors import MissingDependencyError


def polars() -> ModuleType:
    """Return Polars.

    Raises:
        MissingDependencyError: Polars is not installed, or is older than version 2, whose scan interface differs.
    """
    try:
        import polars
    except ImportError:
        raise MissingDependencyError("polars", "query") from None
    if int(polars.__version__.partition(".")[0]) < 2:
        raise MissingDependencyError("polars>=2", "query")
    return polars
