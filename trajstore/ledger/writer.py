"""The writer of a ledger."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.base.arguments import INT64_MAX, path_or_url, whole, whole_or_none
from trajstore._core.base.closing import Closing, of_no_use_when_closed
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import local_target
from trajstore._core.store.log_records import encode_line
from trajstore.errors import ConfigurationError, counted
from trajstore.ledger.contents import Segment, read_directory, segments_of
from trajstore.ledger.step import ROW, TrainedStep

SEGMENT_BYTES = 64 << 20
"""Bytes after which the next step begins a new file."""


@of_no_use_when_closed()
class Ledger(Closing):
    """Records every optimizer step of one trainer process. Not thread-safe.

    An incomplete record of a killed process is dropped, with a warning. A trainer that resumes calls
    :meth:`continue_from` with the step of its checkpoint.

    Args:
        path: local folder, made if absent; one for each rank.
        segment_bytes: bytes after which the next step begins a new file.

    Raises:
        StoreLockedError: another process writes to it.
        CorruptStoreError: it is damaged.
    """

    def __init__(self, path: str | Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = whole("segment_bytes", segment_bytes, 1)
        self._changing = locks.lock("Ledger._changing")
        self._directory = LocalDirectory(local_target("ledger", path_or_url("path", path)))
        self._lock = self._directory.lock_writer()
        try:
            self._recover()
        except BaseException:
            self._lock.release()
            raise

    def _recover(self) -> None:
        self._segments = segments_of(self._directory)
        self._last: int | None = None
        self._size = 0
        self._config: Mapping[str, Any] = {}  # of the last record of this process
        while self._segments:
            segment = self._segments[-1]
            tail = segment.records(self._directory)
            self._last, self._size = tail.records[-1]["step"] if tail.records else segment.after, tail.end
            if tail.torn:
                warnings.warn(
                    f"{self._directory.url}: the record after step {self._last} is incomplete and is dropped",
                    stacklevel=4,
                )
                self._directory.cut(segment.name, tail.end)
            if tail.records:
                return
            if not tail.torn:
                warnings.warn(
                    f"{self._directory.url}/{segment.name}: is empty and is removed: its first record was interrupted, "
                    "or what was recorded is lost",
                    stacklevel=4,
                )
            self._directory.remove([segment.name], durable=True)
            self._segments.pop()
            self._last = None

    @property
    def url(self) -> str:
        """The folder."""
        return self._directory.url

    @property
    def last(self) -> int | None:
        """Number of the newest step; None without steps."""
        return self._last

    def continue_from(self, step: int | None) -> None:
        """Continue from the checkpoint of a step; the next record replaces the steps after it, with a warning.

        An empty ledger may begin anywhere. Without a further record nothing is replaced.

        Args:
            step: of the checkpoint; None = the run begins anew.

        Raises:
            ConfigurationError: the ledger ends before the step.
        """
        if self._last is None or step == self._last:
            return
        if step is not None and step > self._last:
            raise ConfigurationError(
                f"{self._directory.url}: lacks step {step}, from which the trainer continues; it ends with "
                f"{self.last}. Use the ledger of that run, or a new folder"
            )
        first = 0 if step is None else step + 1
        if replaced := len(read_directory(self._directory, first, self._last).steps):
            after = "" if step is None else f" after step {step}"
            warnings.warn(f"{self._directory.url}: {counted(replaced, 'step')}{after} will be replaced", stacklevel=3)
        self._last, self._size, self._config = step, self._segment_bytes, {}

    def record(self, step: TrainedStep) -> None:
        """Record a step; it is durable on return, so record it before any checkpoint that contains it.

        An interrupt, such as Ctrl-C, ends the wait for it, not the recording.

        Raises:
            ConfigurationError: the step is invalid, or its number is not above the last one's.
            OSError: it could not be written; the ledger is as before.
        """
        step.check()
        uninterrupted(partial(self._record, step))

    def record_batch(
        self, number: int, columns: Mapping[str, npt.NDArray[Any]], policy_version: int | None = None
    ) -> None:
        """Record a batch of rows drawn from a store as a step; a loader calls this before it returns the batch.

        A batch that a resumed loader returns again replaces the earlier record and those after it, with a warning.

        Args:
            number: number of the batch, from 1.
            columns: values of its rows, ``[n]``, by the name of a column of ``ROW``; absent ones are unknown.
            policy_version: version of the policy that trains on it; None = unknown.

        Raises:
            ConfigurationError: a value does not fit its column, or the ledger ends before the preceding batch.
            OSError: it could not be written; the ledger is as before.
        """
        rows = np.zeros(len(columns["trajectory"]), ROW)
        rows["replayed"] = 1
        for name, values in columns.items():
            rows[name] = values
            if not np.array_equal(rows[name], values, equal_nan=True):
                raise ConfigurationError(f"{self.url}: batch {number}: {name} has values beyond {ROW[name]}")
        unknown = tuple(name for name in ROW.names or () if name not in {*columns, "replayed"})
        version = whole_or_none("policy_version", policy_version, -INT64_MAX)
        self.continue_from(number - 1 or None)
        self.record(TrainedStep(number, rows, policy_before=version, unknown=unknown))

    def _record(self, step: TrainedStep) -> None:
        with self._changing:
            if self._last is not None and step.step <= self._last:
                raise ConfigurationError(
                    f"{self._directory.url}: step {step.step} is not after step {self._last}; a trainer that resumes "
                    "calls continue_from first"
                )
            segments = self._segments
            begins = not segments or self._size >= self._segment_bytes
            segment = Segment(len(segments), self._last) if begins else segments[-1]
            known = dataclasses.replace(step, config={}) if step.config == self._config else step
            line = encode_line(known.to_json(self._last))
            self._directory.append(segment.name, line)
            if begins:
                segments.append(segment)
                self._size = 0
            self._last, self._size, self._config = step.step, self._size + len(line), step.config

    def close(self) -> None:
        """Release the folder."""
        with self._changing:
            self._lock.release()
