"""Shard formats by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from trajstore._core.formats.base import Fetch, ShardManifest, ShardReader, TrajectoryFormat
from trajstore._core.formats.frames import FramesReader
from trajstore._core.formats.packed import PackedReader, is_packed
from trajstore.errors import ConfigurationError, CorruptStoreError


def _made(module: str, name: str, **options: Any) -> TrajectoryFormat:
    made: TrajectoryFormat = getattr(import_module(f"trajstore._core.formats.{module}"), name)(**options)
    return made


FORMATS: Mapping[str, Callable[..., TrajectoryFormat]] = {
    "pt": partial(_made, "pt", "PtFormat"),
    "pkl": partial(_made, "pkl", "PklFormat"),
    "zarr": partial(_made, "zarr", "ZarrFormat"),
}
"""Values of ``trajectory_format``, and their constructors."""


def get_format(name: str, **options: Any) -> TrajectoryFormat:
    """Return a format by name, with its options.

    Raises:
        ConfigurationError: no format has this name, or it lacks an option.
        MissingDependencyError: its package is not installed.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigurationError(f"trajectory_format {name!r}: must be one of {', '.join(FORMATS)}")
    try:
        return FORMATS[name](**options)
    except TypeError as error:
        raise ConfigurationError(f"trajectory_format {name!r}: {error}") from error


def open_shard(fetch: Fetch, manifest: ShardManifest) -> ShardReader:
    """Return a reader of a shard as the index describes it.

    Raises:
        CorruptStoreError: the index names a format that does not exist, or the files are damaged.
        MissingDependencyError: the format's package is not installed.
    """
    if manifest.format not in FORMATS:
        raise CorruptStoreError(
            f"{manifest.name}: the index says that its format is {manifest.format!r}, which does not exist; "
            "restore the index from a copy, or upgrade trajstore"
        )
    reader = get_format(manifest.format).open(fetch, manifest)
    if is_packed(manifest.schema):
        return PackedReader(reader, manifest)
    return FramesReader(reader, manifest) if manifest.schema.stored_once else reader
