"""Checks training ledgers by their paths. Thin."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.salvage import open_leniently
from trajstore.errors import StoreNotFoundError
from trajstore.ledger import LEDGER_FOLDER, Audit, audit, read
from trajstore.ledger.contents import read_directory
from trajstore.operations.opening import open_readable


def audit_path(path: str | Path) -> dict[int, Audit]:
    """Check a ledger alone, or the ledgers of a store or of the ranks of a run, each against its trajectories.

    Args:
        path: ledger, store or run directory, or URL.

    Returns:
        The result of each ledger by rank (``ALONE``), see :func:`~trajstore.ledger.audit`.

    Raises:
        StoreNotFoundError: there is no ledger, and no store with one.
        CorruptStoreError: the store is damaged.
    """
    with suppress(StoreNotFoundError):
        return {ALONE: audit(read(path, strict=False))}
    reader, _ = open_readable(path)
    results = {}
    with closing(reader):
        for rank, catalog in reader._live.catalogs_by_rank().items():
            try:
                ledger = read_directory(catalog.directory.inner(LEDGER_FOLDER), strict=False)
            except StoreNotFoundError as error:
                absent = error
            else:
                whole, _ = open_leniently(catalog.directory)  # the reader of a run has no index of each store
                results[rank] = audit(ledger, whole)
    if not results:
        raise absent
    return results
