"""Training ledgers for the page: curves over optimizer steps, the rows of a step, the steps that trained a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.files.base import Directory
from trajstore._core.store.run_ids import in_run, shown_id
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError
from trajstore.ledger import LEDGER_FOLDER, LedgerContents
from trajstore.ledger.contents import contents_of, segments_of
from trajstore.view.answers import plain

Answer = dict[str, Any]

MOST_POINTS = 2000
"""Maximum number of points of a curve; more steps are shown in part, evenly spaced."""

MOST_ROWS = 2000
"""Maximum number of rows of an answer."""


class Training:
    """The ledgers in the stores' directories. They are read again when a file of them has grown. For one thread."""

    def __init__(self) -> None:
        self._files: list[tuple[int, str, int]] = []
        self._ledgers: dict[int, LedgerContents] = {}
        self._tables: dict[int, npt.NDArray[np.void]] = {}

    def is_there(self, directories: Mapping[int, Directory]) -> bool:
        """Return whether any of the stores, by rank, has a ledger."""
        try:
            return any(segments_of(directory.inner(LEDGER_FOLDER)) for directory in directories.values())
        except CorruptStoreError:  # reading it names the damage
            return True

    def read(self, directories: Mapping[int, Directory]) -> dict[int, LedgerContents]:
        """Return the ledgers by rank; damaged records are left out and named in ``damaged``.

        Raises:
            CorruptStoreError: a file of a ledger is absent.
        """
        folders = {rank: directory.inner(LEDGER_FOLDER) for rank, directory in directories.items()}
        segments = {rank: segments_of(folder) for rank, folder in folders.items()}
        files = [
            (rank, segment.name, folders[rank].size(segment.name))
            for rank, some in segments.items()
            for segment in some
        ]
        if files != self._files:
            self._ledgers = {
                rank: contents_of(folders[rank], some, strict=False) for rank, some in segments.items() if some
            }
            self._tables = {rank: ledger.table() for rank, ledger in self._ledgers.items()}
            self._files = files
        return self._ledgers

    def tables(self, directories: Mapping[int, Directory]) -> dict[int, npt.NDArray[np.void]]:
        """Return all rows of the ledgers by rank, as of ``LedgerContents.table``; raises the errors of :meth:`read`."""
        self.read(directories)
        return self._tables


def curves(ledgers: Mapping[int, LedgerContents]) -> Answer:
    """Return figures over steps: ``{"steps", "of", "curves", "damaged", "replaced"}``.

    ``curves`` has the means over the rows of a step of all ranks, by name, null where unknown: ``rows`` (their number),
    ``replayed`` and ``no_loss`` (shares), ``ratio`` and ``advantage`` (of its absolute value), ``age`` in policy
    versions; and each loss term ``loss/NAME``, its mean over the ranks.
    """
    tables = [ledger.table() for ledger in ledgers.values()]
    rows = np.concatenate(tables) if tables else np.zeros(0, [("step", np.int64)])
    numbers = np.array(sorted({step for ledger in ledgers.values() for step in ledger.steps}), np.int64)
    places = np.searchsorted(numbers, rows["step"])

    def mean(values: npt.NDArray[Any]) -> list[float | None]:
        known = np.isfinite(values)
        count = np.bincount(places[known], minlength=len(numbers))
        total = np.bincount(places[known], values[known], minlength=len(numbers))
        return [float(part / n) if n else None for part, n in zip(total, count, strict=True)]

    found: dict[str, list[Any]] = {}
    if len(rows):
        found = {
            "rows": np.bincount(places, minlength=len(numbers)).tolist(),
            "replayed": mean(rows["replayed"].astype(np.float64)),
            "no_loss": mean((rows["weight"] == 0).astype(np.float64)),
            "ratio": mean(rows["ratio"].astype(np.float64)),
            "advantage": mean(np.abs(rows["advantage"].astype(np.float64))),
            "age": mean(rows["age"]),
        }
    for name in sorted({name for ledger in ledgers.values() for step in ledger.steps.values() for name in step.loss}):
        found[f"loss/{name}"] = [_mean_term(ledgers, step, name) for step in numbers.tolist()]
    chosen = sorted({at * (len(numbers) - 1) // (MOST_POINTS - 1) for at in range(MOST_POINTS)}) if len(numbers) else []
    return {
        "steps": [int(numbers[at]) for at in chosen],
        "of": len(numbers),
        "curves": {
            name: [values[at] for at in chosen]
            for name, values in found.items()
            if any(value is not None for value in values)
        },
        "damaged": [sentence for ledger in ledgers.values() for sentence in ledger.damaged],
        "replaced": sum(len(ledger.replaced) for ledger in ledgers.values()),
    }


def _mean_term(ledgers: Mapping[int, LedgerContents], step: int, name: str) -> float | None:
    values = [ledger.steps[step].loss.get(name, math.nan) for ledger in ledgers.values() if step in ledger.steps]
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def rows_of(ledgers: Mapping[int, LedgerContents], number: int) -> Answer:
    """Return a step: ``{"step", "previous", "next", "ranks", "rows", "of"}``.

    Of each rank: ``rank``, ``policy`` (before, after), ``loss``, ``data``, ``seeds``. Of each row the columns of
    ``trajstore.ledger.ROW``, its ``task``, its ``age``, and its ``id`` as displayed; null for rollouts in no store.

    Raises:
        TrajectoryUnavailableError: no ledger has the step.
    """
    steps = sorted({step for ledger in ledgers.values() for step in ledger.steps})
    if number not in steps:
        recorded = f"{steps[0]} to {steps[-1]}" if steps else "no step"
        raise TrajectoryUnavailableError(f"step {number}: not in the training ledger, which has {recorded}")
    at = steps.index(number)
    ranks, rows = [], []
    for rank, ledger in ledgers.items():
        if (step := ledger.steps.get(number)) is None:
            continue
        ranks.append(
            {
                "rank": rank,
                "policy": [step.policy_before, step.policy_after],
                "loss": {name: plain(value) for name, value in step.loss.items()},
                "data": dict(step.data),
                "seeds": dict(step.seeds),
            }
        )
        before = step.policy_before
        for row in step.rows:
            task = step.tasks[int(row["group"])] if step.tasks else None
            age = before - int(row["version"]) if before is not None and row["version"] >= 0 else None
            rows.append({**_row(rank, row), **dict.fromkeys(step.unknown), "task": task, "age": age})
    return {
        "step": number,
        "previous": steps[at - 1] if at else None,
        "next": steps[at + 1] if at + 1 < len(steps) else None,
        "ranks": ranks,
        "rows": rows[:MOST_ROWS],
        "of": len(rows),
    }


def steps_of(tables: Mapping[int, npt.NDArray[np.void]], number: int) -> Answer:
    """Return the rows by which steps trained a trajectory, in order: ``{"trained", "of"}``, the newest ``MOST_ROWS``.

    Args:
        tables: the rows of the ledgers by rank.
        number: its id.
    """
    found: list[Answer] = []
    for rank, table in tables.items():
        stored = table["trajectory"] >= 0
        mine = table[stored & (in_run(rank, np.where(stored, table["trajectory"], 0)) == number)]
        found += [{**_row(rank, row), "step": int(row["step"]), "age": _known(row["age"])} for row in mine]
    found.sort(key=lambda row: row["step"])
    return {"trained": found[-MOST_ROWS:], "of": len(found)}


def _row(rank: int, row: npt.NDArray[np.void]) -> Answer:
    number = int(row["trajectory"])
    return {
        "id": shown_id(int(in_run(rank, np.array([number]))[0])) if number >= 0 else None,
        "rollout": -1 - number if number < 0 else None,
        "row": int(row["row"]),
        "group": int(row["group"]),
        "advantage": _known(row["advantage"]),
        "ratio": _known(row["ratio"]),
        "weight": _known(row["weight"]),
        "probability": _known(row["probability"]),
        "tokens": int(row["tokens"]),
        "version": int(row["version"]) if row["version"] >= 0 else None,
        "replayed": bool(row["replayed"]),
    }


def _known(value: Any) -> Any:
    """Return a number as a JSON value; null if it is NaN, which ledgers use for unknown."""
    return None if math.isnan(value) else plain(float(value))
