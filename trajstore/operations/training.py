"""Checks the training ledgers of a store or run directory against its trajectories."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.salvage import open_leniently
from trajstore.errors import StoreNotFoundError
from trajstore.ledger import (
    LEDGER_FOLDER,
    Audit,
    Difference,
    LedgerContents,
    TrainedStep,
    audit,
    config_difference,
    first_difference,
    read,
)
from trajstore.ledger.audit import TOLERANCE, column_difference, matched_rows, problems_of_rows
from trajstore.ledger.contents import read_directory
from trajstore.operations.opening import open_readable
from trajstore.operations.pools import pool_support


@dataclass(frozen=True, slots=True)
class StoreAudit:
    """The result of :func:`audit_store` for one store.

    Attributes:
        ledger: the result for the ledger alone.
        untrained: number of the store's trajectories that no step trained.
        most: the highest number of steps that trained a trajectory.
        gone: number of trained trajectories that the store has evicted since.
        only_drawn: number of draws of a pool's histories that no step trained; None if this is no pool's store.
        problems: inconsistencies of ledger and store, those of the ledger alone included.
    """

    ledger: Audit
    untrained: int
    most: int
    gone: int
    only_drawn: int | None
    problems: tuple[str, ...]


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
    """Compare two ledgers; of two stores' ledgers, ``columns`` of a difference begins with ``outcome``.

    Outcomes are those of the stores now, and compared where both know them.

    Args:
        path: ledger, or store with a ledger.
        other: the other one.
        tolerance: as for :func:`~trajstore.ledger.first_difference`.

    Raises:
        StoreNotFoundError: there is no ledger.
        CorruptStoreError: a store is damaged.
    """
    ledgers = ledger_of(path), ledger_of(other)
    difference = first_difference(*ledgers, tolerance)
    config = config_difference(*ledgers, None if difference is None or difference.absent else difference.step)
    unknown = {name for ledger in ledgers for step in ledger.steps.values() for name in step.unknown}
    if not all(step.config for ledger in ledgers for step in ledger.steps.values()):
        unknown.add("config")
    if difference is not None and difference.columns:
        steps = [ledger.steps[difference.step] for ledger in ledgers]
        pairs = matched_rows(steps[0], steps[1])
        here, there = (_outcomes(of, step)[rows] for of, step, rows in zip((path, other), steps, pairs.T, strict=True))
        if (unlike := ~np.isnan(here) & ~np.isnan(there) & (here != there)).any():
            found = column_difference(steps[0], steps[1], pairs, here, there, unlike)
            difference = replace(difference, columns={"outcome": found} | difference.columns)
    return Comparison(difference, config, tuple(sorted(unknown)))


def _outcomes(path: str | Path, step: TrainedStep) -> npt.NDArray[np.float64]:
    """Return the outcome of each row's trajectory in a store; NaN where it has none, or there is no single store."""
    values = np.full(len(step.rows), np.nan)
    try:
        reader, _ = open_readable(path)
    except StoreNotFoundError:
        return values
    with closing(reader):
        catalog = reader._live.catalogs_by_rank().get(ALONE)
        if catalog is not None:
            ids, numbers = catalog.index["trajectory_id"], step.rows["trajectory"]
            known = np.isin(numbers, ids)
            values[known] = catalog.index.fact("outcome")[np.searchsorted(ids, numbers[known])]
    return values


def audit_store(path: str | Path, max_age: int | None = None) -> dict[int, StoreAudit]:
    """Check the ledgers of a store or of the ranks of a run, and compare them with the trajectories.

    Every id was committed by the store, a stored trajectory has its group's task and its row's policy version, and a
    pool has drawn each history at least as often as steps have replayed it.

    Args:
        path: store or run directory, or URL.
        max_age: highest age of a row in policy versions; None = any.

    Returns:
        The result of each store with a ledger, by rank (``ALONE``).

    Raises:
        StoreNotFoundError: there is no store, or none with a ledger.
        CorruptStoreError: the store is damaged.
        MissingDependencyError: the store is a pool's, and Polars is not installed (extra ``query``).
    """
    reader, _ = open_readable(path)
    results = {}
    for rank, catalog in reader._live.catalogs_by_rank().items():
        try:
            ledger = read_directory(catalog.directory.inner(LEDGER_FOLDER), strict=False)
        except StoreNotFoundError as error:
            absent = error
        else:
            uses = _uses(reader, rank)
            whole, _ = open_leniently(catalog.directory)  # the reader of a run has no index of each store
            results[rank] = _compared(ledger, audit(ledger, max_age), whole, uses)
    if not results:
        raise absent
    return results


def _uses(reader: Reader, rank: int) -> dict[int, int] | None:
    """Return how often a pool's histories were drawn, by id; None if the store is not a pool's."""
    support = pool_support()
    pool = None if rank != ALONE or support is None else support.records(reader).look()
    if pool is None:
        return None
    table = pool.query().where("uses >= 0").select("trajectory_id", "uses").table()
    return dict(zip(table["trajectory_id"].to_list(), table["uses"].to_list(), strict=True))


def _compared(ledger: LedgerContents, alone: Audit, catalog: Catalog, uses: dict[int, int] | None) -> StoreAudit:
    index = catalog.index
    ids, tasks = index["trajectory_id"], index.fact("task")
    low, high = index["version_low"], index["version_high"]
    problems = list(alone.problems)
    for step in ledger.steps.values():
        rows = step.rows
        numbers: IntArray = rows["trajectory"]
        versions: IntArray = rows["version"]
        lost = numbers >= catalog.next_id
        positions = np.searchsorted(ids, numbers)
        there = np.isin(numbers, ids)
        at = np.where(there, positions, 0)
        other_version, other_task = np.zeros((2, len(rows)), np.bool_)
        if there.any():
            known = there & (versions >= 0) & (low[at] != UNKNOWN_VERSION)
            other_version = known & ((versions < low[at]) | (versions > high[at]))
            if step.tasks:
                texts = [index.texts[text] if text >= 0 else "" for text in tasks[at].tolist()]
                wanted = [step.tasks[group] for group in rows["group"].tolist()]
                other_task = there & np.array([text != task for text, task in zip(texts, wanted, strict=True)])
        reasons = {
            f"trajectory never committed (the store's next id is {catalog.next_id})": lost,
            "trajectory of another task than its group": other_task,
            "trajectory sampled by another policy version than the store says": other_version,
        }
        problems += problems_of_rows(step, reasons)
    times = _times(ledger, replayed_only=False)
    only_drawn = None
    if uses is not None:
        replayed = _times(ledger, replayed_only=True)
        only_drawn = sum(max(drawn - replayed.get(number, 0), 0) for number, drawn in uses.items())
        problems += [
            f"trajectory {number}: replayed in {replayed[number]:,} steps, but drawn {drawn:,} times by the pool"
            for number, drawn in uses.items()
            if replayed.get(number, 0) > drawn
        ]
    trained = np.array([*times], np.int64)
    gone = int((~np.isin(trained, ids) & (trained < catalog.next_id)).sum())
    untrained = int((~np.isin(ids, trained)).sum())
    return StoreAudit(alone, untrained, max(times.values(), default=0), gone, only_drawn, tuple(problems))


def _times(ledger: LedgerContents, *, replayed_only: bool) -> dict[int, int]:
    """Return the number of steps that trained each trajectory."""
    parts = []
    for step in ledger.steps.values():
        mask = step.rows["trajectory"] >= 0
        parts.append(np.unique(step.rows["trajectory"][mask & (step.rows["replayed"] != 0) if replayed_only else mask]))
    numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))
