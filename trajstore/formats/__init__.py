"""Shard formats by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trajstore.errors import ConfigurationError
from trajstore.formats.base import TrajectoryFormat


def _pt(**options: Any) -> TrajectoryFormat:
    from trajstore.formats.pt import PtFormat

    return PtFormat(**options)


def _pkl(**options: Any) -> TrajectoryFormat:
    from trajstore.formats.pkl import PklFormat

    return PklFormat(**options)


def _zarr(**options: Any) -> TrajectoryFormat:
    from trajstore.formats.zarr import ZarrFormat

    return ZarrFormat(**options)


FORMATS: Mapping[str, Callable[..., TrajectoryFormat]] = {"pt": _pt, "pkl": _pkl, "zarr": _zarr}
"""What ``trajectory_format`` may be, and what makes it."""


def get_format(name: str, **options: Any) -> TrajectoryFormat:
    """Return a format by name, with its options.

    Raises:
        ConfigurationError: no format has this name, or it lacks an option.
        MissingDependencyError: its package is not installed.
    """
    try:
        make = FORMATS[name]
    except KeyError:
        raise ConfigurationError(f"trajectory_format {name!r}: must be one of {', '.join(FORMATS)}") from None
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigurationError(f"trajectory_format {name!r}: {error}") from error
