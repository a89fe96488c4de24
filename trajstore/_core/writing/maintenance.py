"""Writes the index file and ``metadata.json``; deletes leftovers of a crash, evicted shards and older log segments.

Called with ``CommitLog._lock`` held, or before the writer starts a second thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trajstore._core.files.base import Directory, EncodedFile, Reader
from trajstore._core.files.local import TEMPORARY_SUFFIX
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.late_values import INBOX_FOLDER
from trajstore._core.store.log_records import LOG_FOLDER, segment_generation
from trajstore._core.store.saved_points import PINS_FOLDER
from trajstore._core.store.sealed import (
    COPY_NAME,
    INDEX_NAME,
    METADATA_NAME,
    begins_sealed,
    is_of_rlinf,
    parse_metadata,
)
from trajstore._core.store.shard_table import shard_number
from trajstore.errors import CorruptStoreError, counted, listed, written

logger = logging.getLogger(__name__)


_OF_RLINF = ".rlinf"

_OF_A_STORE = (METADATA_NAME, INDEX_NAME, COPY_NAME, SHARDS_FOLDER, LOG_FOLDER, PINS_FOLDER)

STORE_FOLDERS = (SHARDS_FOLDER, LOG_FOLDER)
"""Created when a writer opens a store; not recreated if they disappear later."""


def check_unused(directory: Directory) -> None:
    """Refuse to create a store over files of a damaged store or another program.

    The snapshot and its copy are the first files of a new store: without entries they are left by an interrupted
    creation, one or both.

    Raises:
        CorruptStoreError: there are such files.
    """
    names = [name for name in directory.names() if not Catalog.is_beginning(directory, name)]
    files = [name for name in names if name in _OF_A_STORE or name.split("/")[0] in _OF_A_STORE]
    if METADATA_NAME in files:
        parse_metadata(directory.read(METADATA_NAME), f"{directory.url}/{METADATA_NAME}")
    if files:
        raise CorruptStoreError(
            f"{directory.url}: holds {listed(files, 3)}, but no {METADATA_NAME}: the rest of a store; restore that "
            "file, make a new store of the intact part with `trajstore repair`, or write elsewhere"
        )


_COLLECT_EVERY = 60.0  # seconds between deletions of evicted shards from an object store


class Garbage:
    """Deletes shards that no live or pinned trajectory and no reader needs. Only for the writer.

    Args:
        directory: the writer's.
        catalog: its state when the writer opened it.
    """

    def __init__(self, directory: Directory, catalog: Catalog) -> None:
        self.holds = 0
        """Number of active reads that block deletion of shards."""
        self.put_off = False
        """Whether a collection was skipped because of ``holds``."""
        self.held_bytes = 0
        """Bytes of the shards that only readers need, at the last check."""
        self._soon_from = time.monotonic() + _COLLECT_EVERY
        self._directory = directory
        self._opened = catalog.generation
        self._told: set[str] = set()
        self.leftovers = self._find_leftovers(catalog)
        """Unnamed files of an earlier writer that readers may still use."""
        # A reader of this generation may show a snapshot that was removed since; removals make no generation.
        catalog.shards.need(catalog.needed_shards(), catalog.generation + 1)

    def _find_leftovers(self, catalog: Catalog) -> list[str]:
        """Delete unreadable leftovers of an interrupted writer; return files that readers may still use."""
        rows = np.arange(len(catalog.shards), dtype=np.int64)
        known = {name for _, names, _ in catalog.shards.file_sizes(rows) for name in names}
        unknown = [name for name in self._directory.names(SHARDS_FOLDER) if name not in known]
        earlier = [name for name in unknown if (shard_number(name) or 0) < catalog.next_shard]
        # No commit names later numbers; in an object store another writer may own them.
        names = [name for name in unknown if name not in set(earlier)] if self._directory.can_append else []
        unfinished = [name for name in self._directory.names() if name.endswith(TEMPORARY_SUFFIX)]
        names += [name for name in unfinished if name.rpartition("/")[0] in ("", PINS_FOLDER, INBOX_FOLDER)]
        if names:
            self._tell_of_leftovers(names)
            _remove(self._directory, names)
        return earlier

    def _tell_of_leftovers(self, names: Sequence[str]) -> None:
        """Log the deletions: if the end of the log was lost, these files are all that remains of its commits."""
        shards = [name for name in names if name.startswith(SHARDS_FOLDER)]
        logger.log(
            logging.WARNING if shards else logging.INFO,
            "%s: deletes %s of shards that no commit names, and %d unfinished (%s), as interrupted writers leave them",
            self._directory.url,
            counted(len(shards), "file"),
            len(names) - len(shards),
            listed(sorted(names), 3),
        )

    def collect(self, catalog: Catalog, *, soon: bool = False) -> None:
        """Delete unneeded files, unless reads hold them.

        If a deletion fails, the next writer of the directory tries again.

        Args:
            catalog: the state.
            soon: wait for the next call, if the last one was less than a minute ago: the readers are listed each time.
        """
        if soon and time.monotonic() < self._soon_from:
            return
        self._soon_from = time.monotonic() + _COLLECT_EVERY
        self.put_off = self.holds > 0
        if self.put_off:
            return
        rows = catalog.unneeded()
        self.held_bytes = 0
        if not len(rows) and not self.leftovers:
            return
        try:
            readers = self._directory.readers(tidy=True)
        except OSError as error:  # there may be readers; the caller's change is done anyway
            logger.warning(
                "the readers of %s could not be listed, so nothing is deleted: %s", self._directory.url, error
            )
            return
        if self.leftovers and all(reader.generation > self._opened for reader in readers):
            _remove(self._directory, self.leftovers)
            self.leftovers = []
        held = np.zeros(len(rows), np.bool_)
        holding: list[Reader] = []
        for reader in readers:
            by_reader = catalog.shards.held(rows, reader)
            if by_reader.any():
                held |= by_reader
                holding.append(reader)
        going = rows[~held]
        if len(going):
            _remove(self._directory, catalog.shards.files(going.tolist()))
            catalog.shards.remove(going)
        if holding:
            self.held_bytes = int(catalog.shards.nbytes()[rows[held]].sum())
            self._tell(catalog, holding)

    def _tell(self, catalog: Catalog, holding: Sequence[Reader]) -> None:
        """Warn once per process if readers hold more bytes than the store itself."""
        live = int(catalog.index["nbytes"].sum())
        fresh = [reader for reader in holding if reader.process not in self._told]
        if self.held_bytes <= live or not fresh:
            return
        self._told.update(reader.process for reader in fresh)
        logger.warning(
            "%s: %s bytes stay on disk that the store does not need (evicted trajectories, files replaced by "
            "compaction), more than the %s of the store: readers still show them (%s), until they call refresh() or "
            "close(), or end (`trajstore view`)",
            self._directory.url,
            f"{self.held_bytes:,}",
            f"{live:,}",
            "; ".join(dict.fromkeys(reader.holder for reader in fresh)),
        )


def remove_segments(directory: Directory, up_to: int, fences: Sequence[int]) -> None:
    """Delete log segments, except fences, that begin with this generation or an earlier one."""
    old = [
        name
        for name in directory.names(LOG_FOLDER)
        if (first := segment_generation(name)) is not None and first <= up_to and first not in fences
    ]
    _remove(directory, old)


def files_of_rlinf(directory: Directory, index_bytes: int) -> dict[str, bytes]:
    """Return the JSON files of a live store that RLinf has overwritten; it overwrites both on every addition.

    Args:
        directory: the store's.
        index_bytes: size of the index as written; an index of that size is not read but assumed intact.

    Raises:
        OSError: they cannot be read.
    """
    files: dict[str, bytes] = {}
    if not directory.can_append:
        return files  # RLinf writes to local directories only
    with suppress(FileNotFoundError, CorruptStoreError):
        metadata = directory.read(METADATA_NAME)
        if is_of_rlinf(metadata):
            files[METADATA_NAME] = metadata
    with suppress(FileNotFoundError, CorruptStoreError):
        if directory.size(INDEX_NAME) != index_bytes:
            index = directory.read(INDEX_NAME)
            if not begins_sealed("snapshot", index):
                files[INDEX_NAME] = index
    return files


def keep_files_of_rlinf(directory: Directory, files: Mapping[str, bytes]) -> None:
    """Save copies of RLinf's files under other names before trajstore's are written again.

    Raises:
        OSError: the copies could not be written.
    """
    directory.publish([EncodedFile(f"{name}{_OF_RLINF}", [data]) for name, data in files.items()])
    logger.warning(
        "%s: RLinf has written into this store while it was open; its files are kept as %s, and trajstore's are "
        "written again. Stop it, and move these, without %s, and its trajectory_* files to a directory of their own",
        directory.url,
        listed(f"{name}{_OF_RLINF}" for name in files),
        _OF_RLINF,
    )


def _remove(directory: Directory, names: list[Any]) -> None:
    try:
        directory.remove(names)
    except OSError as error:
        logger.warning("could not delete files of %s: %s", directory.url, error)


_RENEWAL, _REMOTE_RENEWAL = 1.0, 60.0
"""Minimum seconds between two updates of ``metadata.json``, and in an object store, where each is a request."""


class Snapshots:
    """Writes the two files of a store.

    Args:
        directory: the store's.
        metadata: returns the buffer's own values of ``metadata.json``.
    """

    def __init__(self, directory: Directory, metadata: Callable[[], Mapping[str, Any]]) -> None:
        self._directory = directory
        self._metadata = metadata
        self.renewed = -1
        """Generation described by ``metadata.json``."""
        self._renew_at = 0.0

    def write(self, catalog: Catalog, keep_after: int | None = None) -> None:
        """Write both files of this state, the index before the metadata that refers to it.

        Log segments that are no longer needed are then deleted; the caller collects garbage.

        Args:
            catalog: the state.
            keep_after: segments that begin with a later generation are kept; None = the state's generation.

        Raises:
            StoreWriteError: writing failed; the log still has everything.
        """
        with written(": the index could not be written; nothing is lost, since the log has every change"):
            damaged = bool(catalog.index_damage)  # and so its bytes are not those of RLinf
            rlinf_files = {} if damaged else files_of_rlinf(self._directory, catalog.snapshot_bytes)
            if rlinf_files:
                keep_files_of_rlinf(self._directory, rlinf_files)
            index = catalog.snapshot_file()
            self._directory.publish(catalog.with_copy(index) if self._directory.can_append else [index])
            metadata = catalog.metadata_file(**self._metadata())
            self._directory.publish([metadata])
        catalog.snapshot_generation = self.renewed = catalog.generation
        catalog.snapshot_bytes, catalog.index_damage = index.nbytes, ""
        catalog.log_bytes = 0
        remove_segments(self._directory, catalog.generation if keep_after is None else keep_after, catalog.fences)

    def renewal_due(self, catalog: Catalog) -> bool:
        """Return whether ``metadata.json`` is due for an update."""
        return self.renewed != catalog.generation and time.monotonic() >= self._renew_at

    def renew(self, catalog: Catalog) -> bool:
        """Update ``metadata.json`` to this state; return False, without writing, if RLinf has overwritten the files.

        The stored generation stays that of the snapshot, which readers rely on.

        Raises:
            OSError: writing failed.
        """
        self._renew_at = time.monotonic() + (_RENEWAL if self._directory.can_append else _REMOTE_RENEWAL)
        if files_of_rlinf(self._directory, catalog.snapshot_bytes):
            return False
        values = {**self._metadata(), "generation": catalog.snapshot_generation}
        self._directory.publish([catalog.metadata_file(**values)])
        self.renewed = catalog.generation
        return True
