"""``trajectory_index.json`` written whole, and ``metadata.json`` beside it. Called with ``CommitLog._lock`` held."""

from __future__ import annotations

import time

from trajstore.core.files.base import Directory
from trajstore.core.store.catalog import Catalog
from trajstore.core.writing.commits import CommitListener
from trajstore.core.writing.maintenance import Garbage, files_of_rlinf, keep_files_of_rlinf, remove_segments
from trajstore.errors import written

_RENEWAL = 1.0
"""Seconds between two renewals of ``metadata.json``."""


class Snapshots:
    """Writes the two files of a store.

    Args:
        directory: the store's.
        format_name: what ``metadata.json`` says of the format of new shards.
        listener: knows what else it says.
    """

    def __init__(self, directory: Directory, format_name: str, listener: CommitListener) -> None:
        self._directory = directory
        self._format_name = format_name
        self._listener = listener
        self.renewed = -1
        """Generation that ``metadata.json`` tells of."""
        self._renew_at = 0.0

    def write(self, catalog: Catalog, garbage: Garbage, keep_after: int | None = None) -> None:
        """Write both files of this state; the index first, so that whoever sees the metadata finds it.

        What nobody needs any more then is deleted: shards, and segments of the log.

        Args:
            catalog: the state.
            garbage: of the store.
            keep_after: segments that begin with a later generation than this stay; None = than the state's.

        Raises:
            StoreWriteError: one of them could not be written; the log still has everything.
        """
        with written(": the index could not be written; the log still has everything"):
            theirs = files_of_rlinf(self._directory, catalog.snapshot_bytes)
            if theirs:
                keep_files_of_rlinf(self._directory, theirs)
            index = catalog.snapshot_file()
            self._directory.publish([index])
            metadata = catalog.metadata_file(trajectory_format=self._format_name, **self._listener.metadata())
            self._directory.publish([metadata])
        catalog.snapshot_generation = self.renewed = catalog.generation
        catalog.snapshot_bytes = index.nbytes
        catalog.log_bytes = 0
        garbage.collect(catalog)
        remove_segments(self._directory, catalog.generation if keep_after is None else keep_after, catalog.fences)

    def renewal_due(self, catalog: Catalog) -> bool:
        """Return whether ``metadata.json`` should be renewed."""
        return self.renewed != catalog.generation and time.monotonic() >= self._renew_at

    def renew(self, catalog: Catalog) -> bool:
        """Let ``metadata.json`` tell of this state; return whether both files are trajstore's, else it is left alone.

        Its generation stays that of the snapshot, which readers rely on.

        Raises:
            OSError: it could not be written.
        """
        self._renew_at = time.monotonic() + _RENEWAL
        if files_of_rlinf(self._directory, catalog.snapshot_bytes):
            return False
        values = {**self._listener.metadata(), "generation": catalog.snapshot_generation}
        self._directory.publish([catalog.metadata_file(trajectory_format=self._format_name, **values)])
        self.renewed = catalog.generation
        return True
