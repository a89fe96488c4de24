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
from dataclasses import dataclass, replace

from trajstore._core.base import locks
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.base.types import IntArray
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.late_values import INBOX_FOLDER, LateValues, check_late_values
from trajstore._core.store.log_records import decode_lines, encode_line, ids_in_words
from trajstore._core.store.notes import Notes
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
    return [name for name in _files(directory) if name.endswith(_WAITS)]


def _files(directory: Directory) -> list[str]:
    """Return the names of the files in a store's inbox, oldest first, without hidden ones.

    macOS writes ``._NAME`` beside files on disks of other systems.
    """
    return [name for name in directory.listing(INBOX_FOLDER)[0] if not name.rpartition("/")[2].startswith(".")]


def _aside(name: str) -> str:
    """Return the name of the refused copy of an inbox file."""
    return name.removesuffix(_WAITS) + _REFUSED


def _late_values_of(data: bytes, source: str, name: str, store_id: str) -> LateValues:
    """Return the values in the content of an inbox file.

    Args:
        data: the content.
        source: URL of the file.
        name: of the file.
        store_id: of the store.

    Raises:
        CorruptStoreError: the file is damaged, or is for another store.
    """
    records = decode_lines(data, source).records
    if len(records) != 1:
        raise CorruptStoreError(f"{source}: is damaged")
    if records[0].get("store_id") != store_id:
        raise CorruptStoreError(f"{source}: is for the store {records[0].get('store_id')!r}, not this one")
    try:
        return replace(LateValues.from_json(records[0]), source=name)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{source}: {error}") from error


@dataclass(frozen=True, slots=True)
class Waiting:
    """An inbox file with values that a store lacks.

    Attributes:
        name: of the file.
        given: its values; None if it is damaged.
        left: those of them that a writer would record; None if there are none.
        why: what is damaged, or why they are refused; else empty.
    """

    name: str
    given: LateValues | None
    left: LateValues | None
    why: str

    @property
    def is_refused(self) -> bool:
        """Whether the values contradict those of the store."""
        return self.given is not None and bool(self.why)

    def __str__(self) -> str:
        """Describe damage, or refused values: their names, origin and the reason."""
        if self.given is None:
            return f"{self.why}; its values reach no trajectory: {GIVE_ANEW}"
        origin = f", given by {self.given.who}," if self.given.who else ""
        return (
            f"the values {listed(self.given.values)} of trajectories {ids_in_words(self.given.ids)}{origin} are "
            f"refused and reach no trajectory: {self.why.removeprefix('annotate: ')}"
        )


class Pending:
    """The inbox of a store as a reader sees it, before a writer records the values.

    Create it before the catalog is opened: a value that the writer records in between is in both, and counts once.

    Args:
        directory: of the store.
        set_aside: include files that a writer has refused. Such a copy is written before the original is deleted; in
            between, only the copy counts.

    Raises:
        OSError: the inbox cannot be listed.
    """

    def __init__(self, directory: Directory, *, set_aside: bool = False) -> None:
        self._url = directory.url
        self._content: dict[str, bytes | Exception] = {}
        names = _files(directory)
        for name in names:
            if not name.endswith((_WAITS, _REFUSED) if set_aside else _WAITS) or (set_aside and _aside(name) in names):
                continue
            try:
                self._content[name] = directory.read(name)
            except FileNotFoundError:
                continue  # recorded since the listing
            except (CorruptStoreError, OSError) as error:
                self._content[name] = error

    def foreseen(
        self, store_id: str, notes: Notes, unknown: Callable[[IntArray], Collection[int]]
    ) -> tuple[Mapping[str, str], list[Waiting]]:
        """Return the kinds of names after all is recorded, and the files whose values a store lacks, oldest first.

        Args:
            store_id: of the store.
            notes: its values.
            unknown: returns the ids among some without a trajectory.
        """
        kinds, files = dict(notes.kinds), []
        for name, data in self._content.items():
            if name in notes.sources:
                continue
            source, given, left = f"{self._url}/{name}", None, None
            try:
                if isinstance(data, Exception):
                    raise data
                given = _late_values_of(data, source, name, store_id)
                why = given.refused
            except (CorruptStoreError, OSError) as error:
                why = str(error).removeprefix(f"{source}: ")
            if given is not None and not why:
                left = given.without(unknown(given.ids))
                try:
                    check_late_values(left, kinds)
                except ConfigurationError as error:
                    left, why = None, str(error)
                else:
                    kinds |= {key: kind for key, kind in left.kinds.items() if kind is not None}
            files.append(Waiting(name, given, left if left is not None and len(left.ids) else None, why))
        return kinds, files

    def add_to(self, catalog: Catalog) -> list[Waiting]:
        """Add the values to a catalog that lacks them; nothing is written. Return the files, as :meth:`foreseen`."""
        _, files = self.foreseen(catalog.store_id, catalog.notes, catalog.unknown)
        for file in files:
            if file.left is not None:
                catalog.annotate(file.left, catalog.generation + 1)
        return files


def kinds_to_come(catalog: Catalog, names: Collection[str]) -> Mapping[str, str]:
    """Return the kinds of value names in a store, including those pending in its inbox.

    A name keeps its kind, so the inbox is read only if the store lacks one of the names.

    Args:
        catalog: of the store.
        names: of the values.
    """
    if catalog.notes.kinds.keys() >= set(names):
        return catalog.notes.kinds
    pending, catalog = Pending(catalog.directory), Catalog.open(catalog.directory)
    return pending.foreseen(catalog.store_id, catalog.notes, catalog.unknown)[0]


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
            names = waiting(self._directory)
            for name in names:
                if name not in self._damaged:
                    self._take(name)
            gone = [name for name in names if name not in self._damaged]
            if gone:
                self._directory.remove(gone, durable=True)
            self._log.forget_sources(self._damaged)
            return len(gone)

    def _take(self, name: str) -> None:
        """Record one file, unless its values are already recorded."""
        catalog = self._log.catalog
        if name in catalog.notes.sources:
            return
        source = f"{self._directory.url}/{name}"
        try:
            update = _late_values_of(self._directory.read(name), source, name, catalog.store_id)
        except CorruptStoreError as error:
            self._damaged.add(name)
            logger.warning("%s: was not applied, and stays: %s", source, error)
            return
        while True:
            gone = self._log.unknown(update.ids)
            if gone:
                evicted = ids_in_words(sorted(gone))
                logger.warning("%s: trajectories %s were evicted; their values are dropped", source, evicted)
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
        logger.warning("%s/%s: %s", self._directory.url, aside, Waiting(aside, update, None, update.refused))

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
