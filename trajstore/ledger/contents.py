"""Reads a ledger."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.files.base import Directory
from trajstore._core.files.opening import open_directory
from trajstore._core.store.log_records import LogTail, decode_each, record_without_end
from trajstore.errors import CorruptStoreError, StoreNotFoundError
from trajstore.ledger.step import ROW, TrainedStep

LEDGER_FOLDER = "ledger"
"""Folder of a ledger in its store's directory, unless another one is chosen."""

_NAME = re.compile(r"steps-(\d{6})-after-(\d+|none)\.log")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a ledger: steps that follow each other.

    Attributes:
        number: of the file.
        after: the step that it continues from; None = the beginning. Steps after it in earlier files do not count.
    """

    number: int
    after: int | None

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"steps-{self.number:06d}-after-{'none' if self.after is None else self.after}.log"

    def records(
        self, directory: Directory, damaged: list[str] | None = None, following: Segment | None = None
    ) -> LogTail:
        """Return its records, by step.

        Args:
            directory: of the ledger.
            damaged: if given, damaged records are left out, and a sentence on each fault is appended.
            following: the next file; None for the newest one, which alone may end in an incomplete record.

        Raises:
            CorruptStoreError: a record is damaged, missing, doubled, out of order, or not of this file.
        """
        source, data = f"{directory.url}/{self.name}", directory.read(self.name)
        lines, torn = _decoded(data)
        faults: list[str] = []
        steps: dict[int, dict[str, Any]] = {}
        newest = first = _number(self.after)
        for begin, length, record in lines:
            at = f"the record at byte {begin}"
            number, after = (record or {}).get("step"), (record or {}).get("after")
            if record is None:
                faults.append(f"{at} is damaged; {length:,} bytes are left out")
            elif not (type(number) is int and type(after) in (int, type(None)) and first <= _number(after) < number):
                faults.append(f"{at} is not of this file: step {number!r} after {after!r}")
            elif number in steps:
                faults.append(f"{at} {'repeats' if record == steps[number] else 'is another one of'} step {number}")
            else:
                if number < newest:
                    faults.append(f"{at} is out of order: step {number} after step {newest}")
                steps[number], newest = record, max(newest, number)
        records = [steps[number] for number in sorted(steps)]
        last, whole = self.after, all(record for _, _, record in lines)
        for record in records:
            if record["after"] != last and whole:  # else a consequence
                missing = f"{record['after']}, and here {'nothing' if last is None else last}"
                faults.append(f"records are missing: step {record['step']} follows step {missing}")
            last = record["step"]
        if lines and not torn and not data.endswith(b"\n"):
            faults.append(f"the line feed of the record at byte {lines[-1][0]} is damaged")
        if following is not None and (torn or _number(following.after) > _number(last)):
            faults.append(f"its end is missing: it ends with step {last}, and {following.name} follows it")
        if faults and damaged is None:
            more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
            raise CorruptStoreError(f"{source}: {faults[0]}{more}; strict=False reads the others")
        if damaged is not None:
            damaged += [f"{source}: {fault}" for fault in faults]
        return LogTail(records, len(data) - torn, torn)


def _number(step: int | None) -> int:
    """Return a step as a number that precedes every step if it is None."""
    return -1 if step is None else step


def _decoded(data: bytes) -> tuple[list[tuple[int, int, dict[str, Any] | None]], int]:
    """Return place, length and record of each line, None for a damaged one; and the bytes of an incomplete last one.

    A crash leaves the beginning of a line, or zeros where the disk wrote nothing. All else was complete and durable.
    """
    lines: list[tuple[int, int, dict[str, Any] | None]] = []
    begin = torn = 0
    for record, end in decode_each(data):
        if record is None and end == len(data):
            record = record_without_end(data[begin:])
            complete = record is not None or (data.endswith(b"\n") and _ZEROS not in data[begin:])
            torn = 0 if complete else end - begin
        if not torn:
            lines.append((begin, end - begin, record))
        begin = end
    return lines, torn


_ZEROS = bytes(16)


def segments_of(directory: Directory) -> list[Segment]:
    """Return the files of a ledger in order.

    Raises:
        CorruptStoreError: one is absent.
    """
    matches = [match for match in map(_NAME.fullmatch, directory.names()) if match]
    segments = [Segment(int(match[1]), None if match[2] == "none" else int(match[2])) for match in matches]
    for number, segment in enumerate(segments):
        if segment.number != number:
            raise CorruptStoreError(f"{directory.url}: lacks the file steps-{number:06d}-after-*.log")
    return segments


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """The steps of a ledger.

    Attributes:
        steps: by number, in order: those that led to the newest one.
        replaced: numbers of steps that a resumed run replaced, in the order of their recording.
        torn: bytes of an incomplete record at the end.
        empty: whether the newest file has no bytes: its first record was interrupted, or it was emptied.
        damaged: a sentence on each damaged record, which is left out; only with ``strict=False``.
    """

    steps: dict[int, TrainedStep]
    replaced: tuple[int, ...]
    torn: int
    empty: bool = False
    damaged: tuple[str, ...] = ()

    @property
    def last(self) -> int | None:
        """Number of the newest step; None without steps."""
        return next(reversed(self.steps), None)

    def table(self) -> npt.NDArray[np.void]:
        """Return all rows, ``[n]`` of ``ROW`` with ``step`` and ``age`` (in policy versions; NaN if unknown).

        Columns that a step does not know are NaN, or 0 for whole numbers.
        ``trajectory`` is below 0 for rollouts that are in no store: see ``ROW``.
        """
        table = np.empty(
            sum(len(step.rows) for step in self.steps.values()),
            [("step", np.int64), ("age", np.float64), *((name, ROW[name]) for name in ROW.names or ())],
        )
        end = 0
        for number, step in self.steps.items():
            part = table[end : end + len(step.rows)]
            for name in ROW.names or ():
                is_unknown = name in step.unknown and ROW[name].kind == "f"
                part[name] = np.nan if is_unknown else step.rows[name]
            part["step"] = number
            version, before = step.rows["version"].astype(np.float64), step.policy_before
            part["age"] = np.where(version >= 0, np.nan if before is None else before - version, np.nan)
            end += len(part)
        return table


def read(
    path: str | Path, first: int = 0, last: int | None = None, *, strict: bool = True, **options: Any
) -> LedgerContents:
    """Read a ledger; its writer may be running. Files that have only other steps are not read.

    Args:
        path: path or URL.
        first: the first step wanted.
        last: the last one; None = the newest.
        strict: refuse a damaged ledger; False leaves damaged records out and lists them in ``damaged``.
        options: for the file system of a URL.

    Raises:
        StoreNotFoundError: there is no ledger.
        CorruptStoreError: it is damaged; names the byte.
    """
    return read_directory(open_directory(path, **options), first, last, strict=strict)


def read_directory(
    directory: Directory, first: int = 0, last: int | None = None, *, strict: bool = True
) -> LedgerContents:
    """Read the ledger in a directory; see :func:`read`."""
    segments = segments_of(directory)
    if not segments:
        raise StoreNotFoundError(
            f"{directory.url}: there is no ledger: no trainer has recorded its steps here, or the path is wrong"
        )
    damaged: list[str] | None = None if strict else []
    files, last_segment = segments, segments[-1]
    newest = last_segment.records(directory, damaged)
    if not newest.records:  # a crash before its first record: it replaces nothing
        segments = segments[:-1]
    high = math.inf if last is None else last
    starts = [-1 if segment.after is None else segment.after for segment in segments]
    steps: dict[int, TrainedStep] = {}
    replaced: list[int] = []
    for place, (segment, start) in enumerate(zip(segments, starts, strict=True)):
        end = min(starts[place + 1 :], default=math.inf)
        if (first, last) != (0, None) and not (start < min(end, high) and first <= end):
            continue
        tail = newest if segment is last_segment else segment.records(directory, damaged, files[place + 1])
        for record in tail.records:
            if not first <= record["step"] <= high:
                continue
            if record["step"] > end:
                replaced.append(record["step"])
            else:
                steps[record["step"]] = TrainedStep.from_json(record, f"{directory.url}/{segment.name}")
    config: Mapping[str, Any] = {}
    for number, step in steps.items():
        if step.config:
            config = step.config
        elif config:
            steps[number] = dataclasses.replace(step, config=config)
    empty = not newest.end and not newest.torn
    return LedgerContents(steps, tuple(replaced), newest.torn, empty, tuple(damaged or ()))
