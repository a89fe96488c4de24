"""Values that other processes have for trajectories of a store: one file each, which the store's writer takes in.

Whoever has values publishes a file ``inbox/<time>-<uuid>.json``. The writer records it in the log by its name, and then
deletes it. A crash between the two leaves a file whose name is in the log: it is deleted, and not taken in again. What
contradicts the store, since others gave the name another kind meanwhile, is set aside: ``inbox/<time>-<uuid>.refused``.
"""

from __future__ import annotations

import logging
import queue
import re
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from trajstore.core.base import locks
from trajstore.core.base.interrupts import uninterrupted
from trajstore.core.files.base import Directory, EncodedFile
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.given import Said
from trajstore.core.store.log_records import decode_lines, encode_line, ids_in_words
from trajstore.core.writing.commit_log import CommitLog
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreClosedError, StoreError, listed

logger = logging.getLogger(__name__)

INBOX_FOLDER = "inbox"

_WAITS, _REFUSED = ".json", ".refused"

_STAMPED = re.compile(rf"{INBOX_FOLDER}/([0-9]{{20}})-[0-9a-f]{{32}}{_WAITS}")

_SECONDS, _SECONDS_REMOTE = 1.0, 10.0
"""Between two looks; a look at an object store is a request."""


def put(directory: Directory, store_id: str, said: Said) -> str:
    """Put values into the inbox of a store, durably, behind what waits there; return the name of the file.

    Raises:
        OSError: it could not be written.
    """
    stamps = [int(found[1]) for name in waiting(directory) if (found := _STAMPED.fullmatch(name))]
    name = f"{INBOX_FOLDER}/{max([said.time, *(stamp + 1 for stamp in stamps)]):020d}-{uuid.uuid4().hex}{_WAITS}"
    directory.publish([EncodedFile(name, [encode_line({"store_id": store_id, **said.to_json()})])])
    return name


def waiting(directory: Directory) -> list[str]:
    """Return the names of the files in the inbox of a store, the oldest first."""
    return sorted(name for name in directory.names(INBOX_FOLDER) if name.endswith(_WAITS))


def waiting_or_refused(directory: Directory) -> list[str]:
    """Return the names of the files in the inbox of a store, also of those set aside, the oldest first.

    A file is set aside before it is deleted; between the two only the one set aside is named.
    """
    there = {name for name in directory.names(INBOX_FOLDER) if name.endswith((_WAITS, _REFUSED))}
    return sorted(name for name in there if name.endswith(_REFUSED) or _aside(name) not in there)


def _aside(name: str) -> str:
    """Return the name under which a file of the inbox is set aside."""
    return name.removesuffix(_WAITS) + _REFUSED


def said_in(directory: Directory, name: str, store_id: str) -> Said:
    """Return the values that a file of the inbox has.

    Raises:
        CorruptStoreError: it is damaged, or is for another store.
        FileNotFoundError: it is gone.
    """
    source = f"{directory.url}/{name}"
    records = decode_lines(directory.read(name), source).records
    if len(records) != 1:
        raise CorruptStoreError(f"{source}: is damaged")
    if records[0].get("store_id") != store_id:
        raise CorruptStoreError(f"{source}: is for the store {records[0].get('store_id')!r}, which is another one")
    try:
        return replace(Said.from_json(records[0]), source=name)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{source}: {error}") from error


def refused_in_words(said: Said) -> str:
    """Return which values were refused, of whom, and why."""
    who = f", given by {said.who}," if said.who else ""
    return (
        f"the values {listed(said.values)} of trajectories {ids_in_words(said.ids)}{who} are refused and reach no "
        f"trajectory: {said.refused.removeprefix('annotate: ')}"
    )


def kinds_to_come(catalog: Catalog, names: Collection[str]) -> Mapping[str, str]:
    """Return the kinds that the names of values have in a store, or will have once what waits is taken in.

    A name keeps its kind, so the inbox is read only where the store lacks one of them.

    Args:
        catalog: of the store.
        names: those that are asked about.
    """
    if catalog.notes.kinds.keys() >= set(names):
        return catalog.notes.kinds
    there = InboxView(catalog.directory).look(catalog.store_id)
    catalog = Catalog.open(catalog.directory)  # after that: what was taken in between is in the store
    left = [said.without(catalog.unknown(said.ids)) for said in there if not said.refused]
    return catalog.notes.foreseen(said for said in left if said.ids)[0]


class InboxView:
    """What the inbox of a store has, for somebody who only looks. Not safe to call from several threads.

    Args:
        directory: of the store.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._known: dict[str, Said | None] = {}
        """By file; None for what cannot be read, which the writer warns of. No file changes."""

    def look(self, store_id: str) -> list[Said]:
        """Return what is there and can be read, also what is set aside, the oldest first.

        Args:
            store_id: of the store; values for others are passed over.

        Raises:
            OSError: the inbox cannot be read.
        """
        there = waiting_or_refused(self._directory)
        for name in self._known.keys() - set(there):
            del self._known[name]
        for name in there:
            if name not in self._known:
                with suppress(FileNotFoundError):  # it was taken in just now
                    self._known[name] = self._read(name, store_id)
        return [said for name in there if (said := self._known.get(name)) is not None]

    def _read(self, name: str, store_id: str) -> Said | None:
        try:
            return said_in(self._directory, name, store_id)
        except CorruptStoreError:
            return None


class Inbox:
    """Takes in what the inbox of the writer's store has. Safe to call from several threads.

    Args:
        log: of the store.
    """

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._directory = log.directory
        self._one = locks.lock("Inbox._one")
        self._damaged: set[str] = set()
        self._told = ""
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def take_in(self) -> int:
        """Record what is there, and delete it; return how many files.

        A warning names what contradicts the store, which is set aside, and what is damaged, which stays.

        Raises:
            StoreWriteError: the log could not be written; the rest stays.
            StoreClosedError: the writer was closed.
            OSError: the inbox cannot be read.
        """
        with self._one:
            there = waiting(self._directory)
            for name in there:
                if name not in self._damaged:
                    self._take(name)
            gone = [name for name in there if name not in self._damaged]
            if gone:
                self._directory.remove(gone, durable=True)
            self._log.forget_sources(self._damaged)
            return len(gone)

    def _take(self, name: str) -> None:
        """Record one file, if its values are not recorded yet."""
        catalog = self._log.catalog
        if name in catalog.notes.sources:
            return
        try:
            said = said_in(self._directory, name, catalog.store_id)
        except CorruptStoreError as error:
            self._damaged.add(name)
            logger.warning("%s/%s: was not taken in, and stays: %s", self._directory.url, name, error)
            return
        gone = self._log.unknown(said.ids)
        if gone:
            logger.warning(
                "%s/%s: trajectories %s have left the store; their values are dropped",
                self._directory.url,
                name,
                ids_in_words(sorted(gone)),
            )
            said = said.without(gone)
        try:
            if said.ids:
                self._log.annotate(said)
        except ConfigurationError as error:
            self._set_aside(replace(said, source="", refused=str(error)), name)

    def _set_aside(self, said: Said, name: str) -> None:
        """Keep what contradicts the store under a name that says so; the file itself is deleted after that."""
        aside = _aside(name)
        line = encode_line({"store_id": self._log.catalog.store_id, **said.to_json()})
        self._directory.publish([EncodedFile(aside, [line])])
        logger.warning("%s/%s: %s", self._directory.url, aside, refused_in_words(said))

    def look(self) -> bool:
        """Take in what is there; a failure is logged once, and the rest tried again the next time.

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
                logger.warning("%s: the inbox could not be taken in: %s", self._directory.url, error)
        return True

    def run(self) -> None:
        """Take in what comes, until :meth:`stop`."""
        seconds = _SECONDS if self._directory.can_append else _SECONDS_REMOTE
        while True:
            with suppress(queue.Empty):
                self._news.get(timeout=seconds)
                return
            if not self.look():
                return

    def stop(self) -> None:
        """Let :meth:`run` return."""
        self._news.put(True)
