"""Deleting what nobody needs: leftovers of a crash, evicted shards, log segments behind a snapshot."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from trajstore.catalog import INDEX_NAME, METADATA_NAME, Catalog
from trajstore.commits import LOG_FOLDER, segment_generation
from trajstore.errors import CorruptStoreError
from trajstore.local import TEMPORARY_SUFFIX
from trajstore.pins import PINS_FOLDER
from trajstore.storage import Directory

logger = logging.getLogger(__name__)

SHARDS_FOLDER = "shards"


def check_unused(directory: Directory) -> None:
    """Refuse to begin a store where files of a damaged store, or of somebody else, would be overwritten.

    The snapshot is the first file of a new store: one without entries is what an interrupted beginning left.

    Raises:
        CorruptStoreError: there are such files.
    """
    names = directory.names()
    if INDEX_NAME in names and Catalog.has_begun(directory):
        names.remove(INDEX_NAME)
    for name in names:
        if name in (METADATA_NAME, INDEX_NAME) or name.split("/")[0] in (SHARDS_FOLDER, LOG_FOLDER, PINS_FOLDER):
            raise CorruptStoreError(
                f"{directory.url}: holds {name}, but no {METADATA_NAME} of trajstore; "
                "restore that file, or write elsewhere"
            )


def remove_leftovers(directory: Directory, catalog: Catalog) -> list[str]:
    """Delete temporary files and shards that no committed record names; return their names.

    Only for the holder of the writer's lock. Does nothing while somebody reads, who may still use evicted shards.
    """
    if directory.oldest_reader() is not None:
        return []
    needed = set(catalog.shards.files(np.flatnonzero(catalog.needed_shards()).tolist()))
    names = [name for name in directory.names(SHARDS_FOLDER) if name not in needed]
    names += [name for name in directory.names() if "/" not in name and name.endswith(TEMPORARY_SUFFIX)]
    if names:
        logger.info("removing %d files that an interrupted writer left in %s", len(names), directory.url)
        _remove(directory, names)
    return names


def collect_garbage(directory: Directory, catalog: Catalog) -> None:
    """Delete shards that neither live nor pinned trajectories nor readers need.

    A file that cannot be deleted now is tried again by the next writer that opens the directory.
    """
    try:
        reader = directory.oldest_reader()
    except OSError as error:  # somebody may be reading; what called this has been done all the same
        logger.warning("could not see who reads %s, nothing is deleted: %s", directory.url, error)
        return
    if reader is None or reader >= catalog.generation:
        rows = catalog.take_unneeded()
        if len(rows):
            _remove(directory, catalog.shards.files(rows.tolist()))


def remove_segments(directory: Directory, catalog: Catalog) -> None:
    """Delete the log segments that the snapshot has made superfluous."""
    old = [
        name
        for name in directory.names(LOG_FOLDER)
        if (first := segment_generation(name)) is not None and first <= catalog.snapshot_generation
    ]
    _remove(directory, old)


def _remove(directory: Directory, names: list[Any]) -> None:
    try:
        directory.remove(names)
    except OSError as error:
        logger.warning("could not delete files of %s: %s", directory.url, error)
