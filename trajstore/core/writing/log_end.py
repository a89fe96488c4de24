"""The end of a store's log, where the next commit goes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trajstore.core.files.base import FULL, Directory
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.log_records import segment_name
from trajstore.core.writing.fencing import step_over
from trajstore.errors import StoreWriteError, WriterFencedError

logger = logging.getLogger(__name__)

TakeIn = Callable[[], None]
"""Applies logged lines to the catalog and notifies the listener."""


class LogEnd:
    """Appends lines and applies them once written. Call all methods with the lock of the ``CommitLog`` held.

    In an object store a response may be lost: lines whose append was reported as failed may exist, or appear late. A
    segment can be created only once, so nothing else can take its place: before the next commit, an existing segment is
    read and applied.

    Args:
        directory: of the store.
        catalog: its state, always the same object.
        segment: name of the segment for the next lines.
    """

    def __init__(self, directory: Directory, catalog: Catalog, segment: str) -> None:
        self._directory = directory
        self._catalog = catalog
        self.segment = segment
        self._unanswered: list[tuple[bytes, TakeIn]] = []

    def begin_segment(self) -> None:
        """Send the next lines to a new segment."""
        self.segment = segment_name(self._catalog.generation + 1)

    def append(self, make: Callable[[], tuple[bytes, TakeIn]], retry: str = "flush()") -> None:
        """Append lines and apply them.

        Args:
            make: returns the lines for the generation that is next when it is called; no lines if all are written.
            retry: the user's call that tries again, for the message.

        Raises:
            StoreWriteError: the log could not be written.
        """
        while True:
            data, take_in = make()
            if not data:
                return
            try:
                self._directory.append(self.segment, data)
                break
            except WriterFencedError:
                raise
            except OSError as error:
                if isinstance(error, FileExistsError) and (self.settle() or self._step_over()):
                    continue
                if not self._directory.can_append:  # elsewhere a failed append leaves no data
                    self._unanswered.append((data, take_in))
                remedy = "free space and" if error.errno in FULL else "then"
                raise StoreWriteError(
                    f"{error}: the commit log could not be written; {remedy} {retry} again"
                ) from error
        self._unanswered.clear()
        self._catalog.log_bytes += len(data)
        if not self._directory.can_append:
            self.segment = segment_name(self._catalog.generation + 1 + data.count(b"\n"))
        take_in()

    def settle(self) -> bool:
        """Apply lines of a failed append that were written after all; return whether there were any.

        Raises:
            StoreWriteError: the store cannot be read.
        """
        if not self._unanswered:
            return False
        try:
            content = self._directory.read(self.segment)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreWriteError(f"{error}: cannot be looked at, and may have been written; flush() again") from error
        for data, take_in in self._unanswered:
            if data == content:
                self._unanswered.clear()
                logger.warning("%s/%s: is committed; its answer was lost", self._directory.url, self.segment)
                self._catalog.log_bytes += len(data)
                take_in()
                self.begin_segment()
                return True
        return False

    def _step_over(self) -> bool:
        if not step_over(self._directory, self._catalog):
            return False
        self.begin_segment()
        return True
