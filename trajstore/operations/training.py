"""Checks and compares training ledgers by their paths. Thin."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.salvage import open_leniently
from trajstore.errors import StoreNotFoundError
from trajstore.ledger import (
    LEDGER_FOLDER,
    Audit,
    Difference,
    LedgerContents,
    audit,
    config_difference,
    first_difference,
    read,
)
from trajstore.ledger.audit import TOLERANCE
from trajstore.ledger.contents import read_directory
from trajstore.operations.opening import open_readable


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of :func:`difference_of`.

    Attributes:
        difference: the first one of the steps; None if there is none.
        config: options that differ, with both values.
        unknown: what a ledger does not have in a step, so that it was not compared: columns, ``config``.
    """

    difference: Difference | None
    config: dict[str, tuple[object, object]]
    unknown: tuple[str, ...]


def ledger_of(path: str | Path) -> LedgerContents:
    """Read the intact records of the ledger in a folder, or in the folder ``ledger`` of a store.

    Raises:
        StoreNotFoundError: there is none.
    """
    try:
        return read(path, strict=False)
    except StoreNotFoundError:
        return read(f"{path}/{LEDGER_FOLDER}", strict=False)


def difference_of(path: str | Path, other: str | Path, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two ledgers.

    Args:
        path: ledger, or store with a ledger.
        other: the other one.
        tolerance: as for :func:`~trajstore.ledger.first_difference`.

    Raises:
        StoreNotFoundError: there is no ledger.
    """
    ledgers = ledger_of(path), ledger_of(other)
    difference = first_difference(*ledgers, tolerance)
    config = config_difference(*ledgers, None if difference is None or difference.absent else difference.step)
    unknown = {name for ledger in ledgers for step in ledger.steps.values() for name in step.unknown}
    if not all(step.config for ledger in ledgers for step in ledger.steps.values()):
        unknown.add("config")
    return Comparison(difference, config, tuple(sorted(unknown)))


def audit_path(path: str | Path, max_age: int | None = None) -> dict[int, Audit]:
    """Check a ledger alone, or the ledgers of a store or of the ranks of a run, each against its trajectories.

    Args:
        path: ledger, store or run directory, or URL.
        max_age: highest age of a row in policy versions; None = any.

    Returns:
        The result of each ledger by rank (``ALONE``), see :func:`~trajstore.ledger.audit`.

    Raises:
        StoreNotFoundError: there is no ledger, and no store with one.
        CorruptStoreError: the store is damaged.
    """
    with suppress(StoreNotFoundError):
        return {ALONE: audit(read(path, strict=False), max_age)}
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
                results[rank] = audit(ledger, max_age, whole)
    if not results:
        raise absent
    return results
