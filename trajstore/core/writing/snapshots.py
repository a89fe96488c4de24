"""Writes ``trajectory_index.json`` and ``metadata.json``. Called with ``CommitLog._lock`` held."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trajstore.core.files.base import Directory
from trajstore.core.store.catalog import Catalog
from trajstore.core.writing.maintenance import Garbage, files_of_rlinf, keep_files_of_rlinf, remove_segments
from trajstore.errors import written

_RENEWAL = 1.0
"""Minimum seconds between two updates of ``metadata.json``."""


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

    def write(self, catalog: Catalog, garbage: Garbage, keep_after: int | None = None) -> None:
        """Write both files of this state, the index before the metadata that refers to it.

        Shards and log segments that are no longer needed are then deleted.

        Args:
            catalog: the state.
            garbage: of the store.
            keep_after: segments that begin with a later generation are kept; None = the state's generation.

        Raises:
            StoreWriteError: writing failed; the log still has everything.
        """
        with written(": the index could not be written; the log still has everything"):
            rlinf_files = files_of_rlinf(self._directory, catalog.snapshot_bytes)
            if rlinf_files:
                keep_files_of_rlinf(self._directory, rlinf_files)
            index = catalog.snapshot_file()
            self._directory.publish([index])
            metadata = catalog.metadata_file(**self._metadata())
            self._directory.publish([metadata])
        catalog.snapshot_generation = self.renewed = catalog.generation
        catalog.snapshot_bytes = index.nbytes
        catalog.log_bytes = 0
        garbage.collect(catalog)
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
        self._renew_at = time.monotonic() + _RENEWAL
        if files_of_rlinf(self._directory, catalog.snapshot_bytes):
            return False
        values = {**self._metadata(), "generation": catalog.snapshot_generation}
        self._directory.publish([catalog.metadata_file(**values)])
        self.renewed = catalog.generation
        return True
