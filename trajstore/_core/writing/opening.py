"""Locks, and opens or creates a store for a writer, before its first commit."""

from __future__ import annotations

import logging
import time
from typing import Any

import orjson

from trajstore._core.files.base import FULL, Directory, WriterLock
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.log_records import LOG_FOLDER, segment_generation, segment_name
from trajstore._core.store.saved_points import PINS_FOLDER
from trajstore._core.store.sealed import LEDGER_NAME
from trajstore._core.writing.fencing import fence
from trajstore._core.writing.maintenance import STORE_FOLDERS, Garbage, Snapshots, check_unused
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreLockedError, StoreWriteError, written

logger = logging.getLogger(__name__)


def check_not_mirror(directory: Directory) -> None:
    """Refuse to change a mirror: its store would not have the change, and would refuse the mirror from then on.

    Raises:
        ConfigurationError: the directory is a mirror.
    """
    if LEDGER_NAME in directory.listing()[0]:
        raise ConfigurationError(
            f"{directory.url}: is the mirror of a store (it has a {LEDGER_NAME}), which only the writer of that store "
            "changes; nothing was changed. Use the store itself, or `trajstore restore` the mirror and use the result"
        )


MIRRORED_NAME = "mirrored.json"
"""File in a store's directory with its mirror's state, for tools. Written by the writer; not part of the store."""


def mirror_record(directory: Directory) -> dict[str, Any] | None:
    """Return the last record on a store's mirror; None if there is none or it is unreadable.

    Returns:
        ``url``, ``generation``, ``newest_id``, ``at`` and ``error``, as in
        :class:`~trajstore.remote.mirror.options.MirrorState`, ``since``, that of the lock of the writer that wrote it,
        and ``mount``, the mount point of the mirror's disk (None for a URL).
    """
    try:
        record = orjson.loads(directory.read(MIRRORED_NAME))
        numbers = {name: int(record[name]) for name in ("generation", "newest_id")}
        named = {name: record[name] for name in ("url", "at", "error")}
        return numbers | named | {name: record.get(name) for name in ("since", "mount")}
    except (OSError, CorruptStoreError, orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
        return None


def warn_of_mirror(directory: Directory) -> None:
    """Warn once per process, before a change without a mirror, if the store has one."""
    if directory.url not in _warned and (record := mirror_record(directory)) is not None:
        _warned.add(directory.url)
        logger.warning(
            "%s: is opened for writing without its mirror %s, which does not follow until a writer opens the store "
            "with mirror=%r. If the store is to have no mirror any more, delete %s there",
            directory.url,
            record["url"],
            record["url"],
            MIRRORED_NAME,
        )


_warned: set[str] = set()
_PATIENCE, _PAUSE = 5.0, 0.01
"""Seconds for which a writer waits for a tool that holds the lock for a moment, and between its attempts."""


def lock_store(directory: Directory, *, brief: bool = False, wait: bool = True) -> WriterLock:
    """Take the writer's lock of a store.

    Args:
        directory: of the store.
        brief: the lock is held for a moment only, so other writers wait for it.
        wait: wait for such a holder.

    Raises:
        ConfigurationError: the directory is a mirror.
        StoreLockedError: another writer has the directory open.
        StoreWriteError: the directory cannot be written.
    """
    with written(": the store cannot be written; check its owner, permissions and space (reading needs none of them)"):
        check_not_mirror(directory)
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return directory.lock_writer(brief=brief)
            except StoreLockedError as error:
                if not (wait and error.brief) or time.monotonic() >= until:
                    raise
                time.sleep(_PAUSE)


def open_store(directory: Directory, snapshots: Snapshots) -> tuple[Catalog, Garbage, str]:
    """Return the catalog of a directory, its garbage collector, and the log segment to append to; the lock is held.

    Args:
        directory: created if absent, continued if it holds a store.
        snapshots: writes its two files.

    Raises:
        StoreWriteError: the directory cannot be written.
        CorruptStoreError, UnsupportedVersionError: the existing store cannot be continued.
    """
    if not Catalog.exists(directory):
        directory.create()
        check_unused(directory)
        directory.create(STORE_FOLDERS)
        catalog = Catalog.create(directory)
        garbage = Garbage(directory, catalog)
        snapshots.write(catalog)
        if not directory.can_append:
            fence(directory, catalog)
        return catalog, garbage, segment_name(catalog.generation + 1)
    catalog = Catalog.open(directory)
    directory.create(STORE_FOLDERS)
    directory.settle(PINS_FOLDER)  # a removed pin must not reappear after its trajectories are deleted
    if not directory.can_append:
        fence(directory, catalog)  # before leftovers are determined
    garbage = Garbage(directory, catalog)
    if catalog.generation > catalog.snapshot_generation or catalog.segment_torn or catalog.index_damage:
        # Always after a fence, since an earlier writer's knowledge of the index must become outdated.
        # Start a new segment: a torn last record stays behind in the old one.
        segments = directory.names(LOG_FOLDER)
        try:
            snapshots.write(catalog)
        except StoreWriteError as error:
            cause = error.__cause__
            if not (catalog.segment and isinstance(cause, OSError) and cause.errno in FULL):
                raise
            # Allows opening a store on a full disk, to evict from it.
            logger.warning("%s; the log that is there is continued", error)
            if directory.can_append:  # a killed writer may have left half a record, or one that is not durable yet
                with written(": the end of the log could not be made durable"):
                    directory.cut(catalog.segment, catalog.segment_end)
                catalog.segment_torn = 0
            return catalog, garbage, catalog.segment
        else:
            garbage.collect(catalog)
            directory.remove([name for name in segments if segment_generation(name) not in catalog.fences])
    else:
        snapshots.renewed = catalog.generation
    return catalog, garbage, segment_name(catalog.generation + 1)
