"""The writer of a ledger."""

from __future__ import annotations

import warnings
from pathlib import Path

from trajstore.core.base.closing import Closing, of_no_use_when_closed
from trajstore.core.files.local import LocalDirectory
from trajstore.core.files.opening import local_target
from trajstore.core.store.log_records import encode_line
from trajstore.errors import ConfigurationError, counted
from trajstore.ledger.contents import STEPS, contents_of
from trajstore.ledger.step import TrainedStep


@of_no_use_when_closed()
class Ledger(Closing):
    """Records every optimizer step of one trainer process. Not thread-safe.

    An incomplete record of a killed process is dropped, with a warning. A trainer that resumes calls
    :meth:`continue_from` with the step of its checkpoint.

    Args:
        path: local folder, made if absent; one for each rank.

    Raises:
        StoreLockedError: another process writes to it.
        CorruptStoreError: it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._directory = LocalDirectory(local_target("ledger", path))
        self._lock = self._directory.lock_writer()
        try:
            self._steps = self._recovered()
        except BaseException:
            self._lock.release()
            raise

    def _recovered(self) -> list[int]:
        try:
            contents = contents_of(self._directory)
        except FileNotFoundError:
            return []
        if contents.torn:
            warnings.warn(
                f"{self._directory.url}: the record after step {contents.last} is incomplete and is dropped",
                stacklevel=4,
            )
            self._directory.cut(STEPS, contents.end)
        return list(contents.steps)

    @property
    def last(self) -> int | None:
        """Number of the newest step; None without steps."""
        return self._steps[-1] if self._steps else None

    def continue_from(self, step: int) -> None:
        """Continue from the checkpoint of a step; the next record replaces the steps after it, with a warning.

        An empty ledger may begin anywhere. Without a further record nothing is replaced.

        Raises:
            ConfigurationError: the ledger lacks the step.
        """
        if not self._steps:
            return
        if step and step not in self._steps:
            raise ConfigurationError(
                f"{self._directory.url}: lacks step {step}, from which the trainer continues; it ends with "
                f"{self.last}. Use the ledger of that run, or a new folder"
            )
        kept = [number for number in self._steps if number <= step]
        if replaced := len(self._steps) - len(kept):
            warnings.warn(
                f"{self._directory.url}: {counted(replaced, 'step')} after step {step} will be replaced", stacklevel=3
            )
        self._steps = kept

    def record(self, step: TrainedStep) -> None:
        """Record a step; it is durable on return, so record it before any checkpoint that contains it.

        Raises:
            ConfigurationError: the step is invalid, or its number is not above the last one's.
            OSError: it could not be written; the ledger is as before.
        """
        step.check()
        if self._steps and step.step <= self._steps[-1]:
            raise ConfigurationError(
                f"{self._directory.url}: step {step.step} is not after step {self._steps[-1]}; a trainer that resumes "
                "calls continue_from first"
            )
        self._directory.append(STEPS, encode_line(step.to_json(self.last)))
        self._steps.append(step.step)

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()
