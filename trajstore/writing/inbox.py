"""Values that other processes have for trajectories of a store: one file each, which the store's writer takes in.

Whoever has values publishes a file ``inbox/<time>-<uuid>.json``. The writer records it in the log by its name, and then
deletes it. A crash between the two leaves a file whose name is in the log: it is deleted, and not taken in again.
"""

from __future__ import annotations

import logging
import queue
import uuid
from contextlib import suppress
from dataclasses import replace

from trajstore import locks
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreClosedError, StoreError
from trajstore.files.base import Directory, EncodedFile
from trajstore.interrupts import uninterrupted
from trajstore.store.log_records import decode_lines, encode_line, ids_in_words
from trajstore.store.notes import Said
from trajstore.writing.commit_log import CommitLog

logger = logging.getLogger(__name__)

INBOX_FOLDER = "inbox"

_SECONDS, _SECONDS_REMOTE = 1.0, 10.0
"""Between two looks; a look at an object store is a request."""


def put(directory: Directory, store_id: str, said: Said) -> str:
    """Put values into the inbox of a store, durably; return the name of the file.

    Raises:
        OSError: it could not be written.
    """
    name = f"{INBOX_FOLDER}/{said.time:020d}-{uuid.uuid4().hex}.json"
    directory.publish([EncodedFile(name, [encode_line({"store_id": store_id, **said.to_json()})])])
    return name


def waiting(directory: Directory) -> list[str]:
    """Return the names of the files in the inbox of a store, the oldest first."""
    return sorted(name for name in directory.names(INBOX_FOLDER) if name.endswith(".json"))


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
        """Return what is there and can be read, the oldest first.

        Args:
            store_id: of the store; values for others are passed over.

        Raises:
            OSError: the inbox cannot be read.
        """
        there = waiting(self._directory)
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
        self._refused: set[str] = set()
        self._told = ""
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def take_in(self) -> int:
        """Record what is there, and delete it; return how many files. A warning names what cannot be used and stays.

        Raises:
            StoreWriteError: the log could not be written; the rest stays.
            StoreClosedError: the writer was closed.
            OSError: the inbox cannot be read.
        """
        with self._one:
            there = waiting(self._directory)
            for name in there:
                if name not in self._refused:
                    self._take(name)
            gone = [name for name in there if name not in self._refused]
            if gone:
                self._directory.remove(gone, durable=True)
            self._log.forget_sources(self._refused)
            return len(gone)

    def _take(self, name: str) -> None:
        """Record one file, if its values are not recorded yet."""
        catalog = self._log.catalog
        if name in catalog.notes.sources:
            return
        try:
            said = said_in(self._directory, name, catalog.store_id)
            gone = self._log.unknown(said.ids)
            if gone:
                logger.warning(
                    "%s/%s: trajectories %s have left the store; their values are dropped",
                    self._directory.url,
                    name,
                    ids_in_words(sorted(gone)),
                )
                said = said.without(gone)
            if said.ids:
                self._log.annotate(said)
        except (CorruptStoreError, ConfigurationError) as error:
            self._refused.add(name)
            logger.warning("%s/%s: was not taken in, and stays: %s", self._directory.url, name, error)

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
