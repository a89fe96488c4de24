"""The library that answers questions, imported when the first one is asked."""

from __future__ import annotations

from types import ModuleType

from trajstore.errors import MissingDependencyError


def polars() -> ModuleType:
    """Return Polars.

    Raises:
        MissingDependencyError: it is not installed, or a version before 2, whose scans and streams are others.
    """
    try:
        import polars
    except ImportError:
        raise MissingDependencyError("polars", "query") from None
    if int(polars.__version__.partition(".")[0]) < 2:
        raise MissingDependencyError("polars>=2", "query")
    return polars
