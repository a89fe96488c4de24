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
"""Takes lines that are in the log into the catalog, and tells of them."""


class LogEnd:
    """Appends lines, and takes them in when they are there. Every call is made with the lock of its ``CommitLog`` held.

    In an object store an answer may be lost: lines of which the caller was told that they failed are there all the
    same, or come to be there late. A segment is created once, so nothing else can stand in their place: what stands
    there is looked at before anything is committed behind it, and taken in.

    Args:
        directory: of the store.
        catalog: its state, the same object for ever.
        segment: name of the segment to which the next lines go.
    """

    def __init__(self, directory: Directory, catalog: Catalog, segment: str) -> None:
        self._directory = directory
        self._catalog = catalog
        self.segment = segment
        self._unanswered: list[tuple[bytes, TakeIn]] = []

    def begin_segment(self) -> None:
        """Let the next lines go to a new segment."""
        self.segment = segment_name(self._catalog.generation + 1)

    def append(self, make: Callable[[], tuple[bytes, TakeIn]]) -> None:
        """Append lines, and take them in.

        Args:
            make: returns them, for the generation that is the next one when it is called. No lines: all is there.

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
                if not self._directory.can_append:  # elsewhere a failed append leaves nothing
                    self._unanswered.append((data, take_in))
                remedy = "free space and" if error.errno in FULL else "then"
                raise StoreWriteError(
                    f"{error}: the commit log could not be written; {remedy} flush() again"
                ) from error
        self._unanswered.clear()
        self._catalog.log_bytes += len(data)
        if not self._directory.can_append:
            self.segment = segment_name(self._catalog.generation + 1 + data.count(b"\n"))
        take_in()

    def settle(self) -> bool:
        """Take in lines that are there after all; return whether there were any.

        Raises:
            StoreWriteError: the store cannot be asked.
        """
        if not self._unanswered:
            return False
        try:
            there = self._directory.read(self.segment)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreWriteError(f"{error}: cannot be looked at, and may have been written; flush() again") from error
        for data, take_in in self._unanswered:
            if data == there:
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
