"""The library that answers questions, imported when the first one is asked."""

from __future__ import annotations

from types import ModuleType

from trajstore.errors import MissingDependencyError


def polars() -> ModuleType:
    """Return Polars.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import polars
    except ImportError:
        raise MissingDependencyError("polars", "query") from None
    return polars
