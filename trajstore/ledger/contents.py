"""Reads a ledger."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.files.base import Directory
from trajstore._core.files.opening import open_directory
from trajstore._core.store.log_records import LogTail, decode_each, decode_lines
from trajstore._core.store.sealed import without_advice
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

    def records(self, directory: Directory, damaged: list[str] | None = None) -> LogTail:
        """Return its records.

        Args:
            directory: of the ledger.
            damaged: if given, damaged records are left out, and a sentence on each is appended.

        Raises:
            CorruptStoreError: one is damaged, or is not a record of this file.
        """
        source, data = f"{directory.url}/{self.name}", directory.read(self.name)
        after = self.after
        try:
            tail = decode_lines(data, source)
        except CorruptStoreError as error:
            if damaged is None:
                raise CorruptStoreError(f"{without_advice(str(error))}; strict=False reads the others") from error
            return _intact(data, source, damaged)
        for record in tail.records:
            number = record.get("step")
            before = -1 if after is None else after
            if type(number) is not int or record.get("after") != after or number <= before:
                raise CorruptStoreError(
                    f"{source}: step {number!r} after {record.get('after')!r} follows step {after!r}: it is damaged"
                )
            after = number
        return tail


def _intact(data: bytes, source: str, damaged: list[str]) -> LogTail:
    records: list[dict[str, Any]] = []
    begin = 0
    for record, end in decode_each(data):
        if record is None:
            damaged.append(f"{source}: the record at byte {begin} is damaged; {end - begin:,} bytes are left out")
        else:
            records.append(record)
        begin = end
    return LogTail(records, len(data), 0)


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
        damaged: a sentence on each damaged record, which is left out; only with ``strict=False``.
    """

    steps: dict[int, TrainedStep]
    replaced: tuple[int, ...]
    torn: int
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
        raise StoreNotFoundError(f"{directory.url}: there is no ledger (steps-000000-after-none.log)")
    return contents_of(directory, segments, first, last, strict=strict)


def contents_of(
    directory: Directory, segments: Sequence[Segment], first: int = 0, last: int | None = None, *, strict: bool = True
) -> LedgerContents:
    """Return the contents of a ledger's files; arguments as for :func:`read`."""
    damaged: list[str] | None = None if strict else []
    last_segment = segments[-1]
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
        tail = newest if segment is last_segment else segment.records(directory, damaged)
        for record in tail.records:
            if not first <= record["step"] <= high:
                continue
            if record["step"] > end:
                replaced.append(record["step"])
            else:
                steps[record["step"]] = TrainedStep.from_json(record, f"{directory.url}/{segment.name}")
    return LedgerContents(steps, tuple(replaced), newest.torn, tuple(damaged or ()))
