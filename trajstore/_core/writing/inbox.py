"""Late values from other processes: one file each, which the store's writer records.

A process publishes a file ``inbox/<time>-<uuid>.json``. The writer records it in the log by its name and then deletes
it. A crash between the two leaves a file whose name is in the log: it is deleted and not recorded again. Values that
contradict the store (the name got another kind meanwhile) are set aside as ``inbox/<time>-<uuid>.refused``.
"""

from __future__ import annotations

import logging
import queue
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from trajstore._core.base import locks
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.late_values import INBOX_FOLDER, LateValues
from trajstore._core.store.log_records import decode_lines, encode_line, ids_in_words
from trajstore._core.writing.commit_log import CommitLog
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreClosedError,
    StoreError,
    TrajectoryUnavailableError,
    listed,
)

logger = logging.getLogger(__name__)

GIVE_ANEW = "add its values again with `trajstore annotate`, then delete the file"
"""What to do about a damaged inbox file."""

_WAITS, _REFUSED = ".json", ".refused"

_STAMPED = re.compile(rf"{INBOX_FOLDER}/([0-9]{{20}})-[0-9a-f]{{32}}{_WAITS}")

_ATTEMPTS = 3

_SECONDS, _SECONDS_REMOTE = 1.0, 10.0
"""Polling intervals; on an object store each poll is a request."""


def put(directory: Directory, store_id: str, update: LateValues) -> str:
    """Publish values to a store's inbox, durably and after its current files; return the file name.

    Raises:
        OSError: writing failed.
    """
    stamps = [int(match[1]) for name in waiting(directory) if (match := _STAMPED.fullmatch(name))]
    name = f"{INBOX_FOLDER}/{max([update.time, *(stamp + 1 for stamp in stamps)]):020d}-{uuid.uuid4().hex}{_WAITS}"
    file = EncodedFile(name, [encode_line({"store_id": store_id, **update.to_json()})])
    for attempt in range(_ATTEMPTS):
        try:
            directory.publish([file])
            break
        except FileNotFoundError:  # a writer opened just now and deleted the unfinished file as a leftover
            if attempt == _ATTEMPTS - 1:
                raise
    return name


def waiting(directory: Directory) -> list[str]:
    """Return the names of the pending files in a store's inbox, oldest first."""
    return [name for name in directory.listing(INBOX_FOLDER)[0] if name.endswith(_WAITS) and not _is_hidden(name)]


def waiting_or_refused(directory: Directory) -> list[str]:
    """Return the names of the pending and the refused files in a store's inbox, oldest first.

    The refused copy is written before the original is deleted; in between, only the copy is listed.
    """
    ends = (_WAITS, _REFUSED)
    names = {name for name in directory.listing(INBOX_FOLDER)[0] if name.endswith(ends) and not _is_hidden(name)}
    return sorted(name for name in names if name.endswith(_REFUSED) or _aside(name) not in names)


def _is_hidden(name: str) -> bool:
    """Return whether a file is no entry: macOS writes ``._NAME`` beside files on disks of other systems."""
    return name.rpartition("/")[2].startswith(".")


def _aside(name: str) -> str:
    """Return the name of the refused copy of an inbox file."""
    return name.removesuffix(_WAITS) + _REFUSED


def late_values_in(directory: Directory, name: str, store_id: str) -> LateValues:
    """Return the values in an inbox file.

    Raises:
        CorruptStoreError: the file is damaged, or is for another store.
        FileNotFoundError: the file was deleted.
    """
    return _late_values_of(directory.read(name), directory, name, store_id)


def _late_values_of(data: bytes, directory: Directory, name: str, store_id: str) -> LateValues:
    """Return the values in the content of an inbox file; see :func:`late_values_in`."""
    source = f"{directory.url}/{name}"
    records = decode_lines(data, source).records
    if len(records) != 1:
        raise CorruptStoreError(f"{source}: is damaged")
    if records[0].get("store_id") != store_id:
        raise CorruptStoreError(f"{source}: is for the store {records[0].get('store_id')!r}, not this one")
    try:
        return replace(LateValues.from_json(records[0]), source=name)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{source}: {error}") from error


def refused_in_words(update: LateValues) -> str:
    """Describe refused values: their names, origin and the reason."""
    origin = f", given by {update.who}," if update.who else ""
    return (
        f"the values {listed(update.values)} of trajectories {ids_in_words(update.ids)}{origin} are refused and reach "
        f"no trajectory: {update.refused.removeprefix('annotate: ')}"
    )


def kinds_to_come(catalog: Catalog, names: Collection[str]) -> Mapping[str, str]:
    """Return the kinds of value names in a store, including those pending in its inbox.

    A name keeps its kind, so the inbox is read only if the store lacks one of the names.

    Args:
        catalog: of the store.
        names: of the values.
    """
    if catalog.notes.kinds.keys() >= set(names):
        return catalog.notes.kinds
    pending = Pending(catalog.directory)
    catalog = Catalog.open(catalog.directory)
    pending.add_to(catalog)
    return catalog.notes.kinds


class Pending:
    """The values pending in a store's inbox, for a reader that shows or copies them before a writer records them.

    Create it before the catalog is opened: a value that the writer records in between is in both, and added once.

    Args:
        directory: of the store.

    Raises:
        OSError: the inbox cannot be read.
    """

    def __init__(self, directory: Directory) -> None:
        self._files: dict[str, bytes | CorruptStoreError] = {}
        for name in waiting(directory):
            try:
                self._files[name] = directory.read(name)
            except FileNotFoundError:
                continue  # recorded since the listing
            except CorruptStoreError as error:
                self._files[name] = error

    def add_to(self, catalog: Catalog) -> tuple[int, list[str], list[CorruptStoreError]]:
        """Add the values that a catalog lacks; nothing is written.

        Returns:
            The number of files added, a sentence on each whose values contradict the store, and the errors of damaged
            ones; the values of both are left out.
        """
        added, refused, damaged = 0, [], []
        for name, data in self._files.items():
            if name in catalog.notes.sources:
                continue
            try:
                if isinstance(data, CorruptStoreError):
                    raise data
                update = _late_values_of(data, catalog.directory, name, catalog.store_id)
            except CorruptStoreError as error:
                damaged.append(CorruptStoreError(f"{error}; its values reach no trajectory: {GIVE_ANEW}"))
                continue
            update = update.without(catalog.unknown(update.ids))
            try:
                catalog.notes.check(update)
                if len(update.ids):
                    catalog.annotate(update, catalog.generation + 1)
                    added += 1
            except ConfigurationError as error:
                refused.append(
                    f"{catalog.directory.url}/{name}: {refused_in_words(replace(update, refused=str(error)))}"
                )
        return added, refused, damaged


class InboxView:
    """Read-only view of a store's inbox. Not thread-safe.

    Args:
        directory: of the store.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._known: dict[str, LateValues | None] = {}
        """Values by file; None for unreadable files (the writer warns). Files never change."""

    def look(self, store_id: str) -> list[LateValues]:
        """Return the readable values, pending and refused, oldest first.

        Args:
            store_id: of the store; values for others are skipped.

        Raises:
            OSError: the inbox cannot be read.
        """
        names = waiting_or_refused(self._directory)
        for name in self._known.keys() - set(names):
            del self._known[name]
        for name in names:
            if name not in self._known:
                with suppress(FileNotFoundError):  # recorded just now
                    self._known[name] = self._read(name, store_id)
        return [update for name in names if (update := self._known.get(name)) is not None]

    def _read(self, name: str, store_id: str) -> LateValues | None:
        try:
            return late_values_in(self._directory, name, store_id)
        except CorruptStoreError:
            return None


class Inbox:
    """Records the values in the inbox of the writer's store. Thread-safe.

    Args:
        log: of the store.

    Attributes:
        further: called after each poll, to take in what else waits.
    """

    def __init__(self, log: CommitLog) -> None:
        self.further: Callable[[], object] = lambda: None
        self._log = log
        self._directory = log.directory
        self._one = locks.lock("Inbox._one")
        self._damaged: set[str] = set()
        self._told = ""
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def take_in(self) -> int:
        """Record and delete the pending files; return their number.

        Contradicting files are set aside and damaged ones stay, with a warning for each.

        Raises:
            StoreWriteError: the log could not be written; the remaining files stay.
            StoreClosedError: the writer was closed.
            OSError: the inbox cannot be read.
        """
        with self._one:
            gone = self._record()
            if gone:
                self._directory.remove(gone, durable=True)
            self._log.forget_sources(self._damaged)
            return len(gone)

    def record(self) -> None:
        """Record the pending files, and leave them for :meth:`take_in` to delete.

        Raises:
            StoreWriteError, StoreClosedError, OSError: see :meth:`take_in`.
        """
        with self._one:
            self._record()

    def _record(self) -> list[str]:
        names = waiting(self._directory)
        for name in names:
            if name not in self._damaged:
                self._take(name)
        return [name for name in names if name not in self._damaged]

    def _take(self, name: str) -> None:
        """Record one file, unless its values are already recorded."""
        catalog = self._log.catalog
        if name in catalog.notes.sources:
            return
        try:
            update = late_values_in(self._directory, name, catalog.store_id)
        except CorruptStoreError as error:
            self._damaged.add(name)
            logger.warning("%s/%s: was not applied, and stays: %s", self._directory.url, name, error)
            return
        while True:
            gone = self._log.unknown(update.ids)
            if gone:
                logger.warning(
                    "%s/%s: trajectories %s were evicted; their values are dropped",
                    self._directory.url,
                    name,
                    ids_in_words(sorted(gone)),
                )
                update = update.without(gone)
            try:
                if len(update.ids):
                    self._log.annotate(update)
                return
            except TrajectoryUnavailableError:
                continue  # another thread has evicted one since
            except ConfigurationError as error:
                self._set_aside(replace(update, source="", refused=str(error)), name)
                return

    def _set_aside(self, update: LateValues, name: str) -> None:
        """Publish a ``.refused`` copy of contradicting values; the caller then deletes the original."""
        aside = _aside(name)
        line = encode_line({"store_id": self._log.catalog.store_id, **update.to_json()})
        self._directory.publish([EncodedFile(aside, [line])])
        logger.warning("%s/%s: %s", self._directory.url, aside, refused_in_words(update))

    def look(self) -> bool:
        """Record pending files; a failure is logged once and retried at the next call.

        Returns:
            Whether the writer is open.
        """
        try:
            uninterrupted(self.take_in)
            self._told = ""
        except StoreClosedError:
            return False
        except (StoreError, OSError) as error:
            if str(error) != self._told:
                self._told = str(error)
                logger.warning("%s: the inbox could not be processed: %s", self._directory.url, error)
        return True

    def run(self) -> None:
        """Poll and record pending files until :meth:`stop`."""
        seconds = _SECONDS if self._directory.can_append else _SECONDS_REMOTE
        while True:
            with suppress(queue.Empty):
                self._news.get(timeout=seconds)
                return
            if not self.look():
                return
            self.further()

    def stop(self) -> None:
        """Make :meth:`run` return."""
        self._news.put(True)
