"""Reads a ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.files.base import Directory
from trajstore.core.files.opening import open_directory
from trajstore.core.store.log_records import decode_lines
from trajstore.errors import StoreNotFoundError
from trajstore.ledger.step import ROW, TrainedStep

STEPS = "steps.log"
"""The only file of a ledger beside its lock."""


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """The steps of a ledger.

    Attributes:
        steps: by number, in order: those that led to the newest one.
        replaced: numbers of steps that a resumed run replaced, in the order of their recording.
        end: bytes of whole records.
        torn: bytes of an incomplete record after them.
    """

    steps: dict[int, TrainedStep]
    replaced: tuple[int, ...]
    end: int
    torn: int

    @property
    def last(self) -> int | None:
        """Number of the newest step; None without steps."""
        return next(reversed(self.steps), None)

    def table(self) -> npt.NDArray[np.void]:
        """Return all rows, ``[n]`` of ``ROW`` with ``step`` and ``age`` (in policy versions; NaN if unknown).

        ``polars.from_numpy`` makes a table of it for SQL.
        """
        table = np.empty(
            sum(len(step.rows) for step in self.steps.values()),
            [("step", np.int64), ("age", np.float64), *((name, ROW[name]) for name in ROW.names or ())],
        )
        end = 0
        for number, step in self.steps.items():
            part = table[end : end + len(step.rows)]
            for name in ROW.names or ():
                part[name] = step.rows[name]
            part["step"] = number
            version, before = step.rows["version"].astype(np.float64), step.policy_before
            part["age"] = np.where(version >= 0, np.nan if before is None else before - version, np.nan)
            end += len(part)
        return table


def read(path: str | Path, **options: Any) -> LedgerContents:
    """Read a ledger; its writer may be running.

    Args:
        path: path or URL.
        options: for the file system of a URL.

    Raises:
        StoreNotFoundError: there is no ledger.
        CorruptStoreError: it is damaged; names the byte.
    """
    directory = open_directory(path, **options)
    try:
        return contents_of(directory)
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{directory.url}: there is no ledger ({STEPS})") from error


def contents_of(directory: Directory) -> LedgerContents:
    """Return the contents of a ledger's directory."""
    source = f"{directory.url}/{STEPS}"
    tail = decode_lines(directory.read(STEPS), source)
    steps: dict[int, TrainedStep] = {}
    replaced: list[int] = []
    for record in tail.records:
        step, after = TrainedStep.from_json(record, source)
        dropped = [number for number in steps if after is None or number > after]
        replaced += dropped
        for number in dropped:
            del steps[number]
        steps[step.step] = step
    return LedgerContents(steps, tuple(replaced), tail.end, tail.torn)
