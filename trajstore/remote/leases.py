"""Reader leases in an object store: one object per reader, renewed while it lives."""

from __future__ import annotations

import logging
import os
import threading
import uuid
import weakref

import orjson

from trajstore._core.base import exits, locks
from trajstore._core.base.interrupts import start_thread
from trajstore._core.files.base import Reader, ReaderLease
from trajstore._core.files.holder import LOCK_NAME, holder_document, parse_holder
from trajstore._core.files.leases import LEASE_DIGITS, READERS_FOLDER, lease_head, reader_of
from trajstore.remote.answers import ObjectInfo
from trajstore.remote.object_store import ObjectStore

logger = logging.getLogger(__name__)


class RemoteReaderLease(ReaderLease):
    """A reader's lease, rewritten every third of its time to live.

    Requests cost money, so it is written in between only when it would protect too little: a reader that refreshes
    counts as looking all the time, and the next heartbeat reports its generation. Without heartbeats (reader dropped,
    killed or cut off) the lease expires after its time to live, by the store's clock. A forked child reads under its
    parent's lease, as long as the parent lives and keeps it.

    Args:
        objects: of the directory.
        generation: the oldest generation that will be read.
        ttl: seconds after which the writer may take the reader for dead.

    Raises:
        OSError: the lease cannot be written.
    """

    def __init__(self, objects: ObjectStore, generation: int, ttl: float) -> None:
        self._objects = objects
        self._name = f"{READERS_FOLDER}/{uuid.uuid4()}.pin"
        self._holder = orjson.dumps({**holder_document(), "ttl": ttl})
        self._pid = os.getpid()
        self._mutex = locks.lock("RemoteReaderLease._mutex")
        self._generation = generation
        self._is_looking = True  # now
        self._has_looked = True  # since the last heartbeat
        self._told_looking = True
        self._ended = threading.Event()
        self._write(looking=True)
        self._thread = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._ended, ttl / 3), name="trajstore-reader-lease", daemon=True
        )
        weakref.finalize(self, self._ended.set)
        exits.stop_at_exit(self)
        start_thread(self._thread)

    def stop_and_wait(self) -> None:
        """Stop renewing the lease, which expires."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        with self._mutex:
            self._is_looking = self._has_looked = True
            if not self._told_looking and self._is_kept:
                self._write(looking=True)

    def settle(self, generation: int) -> None:
        with self._mutex:
            self._generation = generation
            self._is_looking = False

    def beat(self) -> None:
        """Renew the lease with its present state."""
        with self._mutex:
            if self._is_kept:
                looking = self._is_looking or self._has_looked
                self._has_looked = False
                self._write(looking=looking)

    def release(self) -> None:
        with self._mutex:
            if not self._is_kept:
                return
            self._ended.set()
        try:
            self._objects.delete(self._name)
        except OSError as error:  # it expires by itself
            logger.debug("a reader's lease could not be removed: %s", error)

    @property
    def _is_kept(self) -> bool:
        return not self._ended.is_set() and os.getpid() == self._pid

    def _write(self, *, looking: bool) -> None:
        self._objects.put(self._name, lease_head(self._generation, looking=looking) + self._holder)
        self._told_looking = looking


def _keep(lease: weakref.ref[RemoteReaderLease], ended: threading.Event, pause: float) -> None:
    """Renew a lease until it is released or garbage-collected."""
    while not ended.wait(pause):
        kept = lease()
        if kept is None:
            return
        try:
            kept.beat()
        except OSError as error:
            logger.warning("a reader's lease could not be renewed; its shards may be deleted: %s", error)
        del kept


class RemoteReaders:
    """Finds live readers by their leases; each version of a lease is read once.

    A lease has expired when the newest heartbeat there, of the writer or a reader, is younger by more than the lease's
    time to live: all times are by the store's clock.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._known: dict[tuple[str, str], tuple[Reader, float]] = {}

    def find(self, *, tidy: bool) -> list[Reader]:
        """Return the live readers; with ``tidy``, remove the leases of the others."""
        leases = self._objects.infos(READERS_FOLDER)
        if not leases:
            self._known = {}
            return []
        signs = [info.modified for info in (*leases.values(), self._lock()) if info and info.modified is not None]
        newest = max(signs, default=0.0)
        known: dict[tuple[str, str], tuple[Reader, float]] = {}
        for name, info in leases.items():
            try:
                reader, ttl = self._known.get((name, info.version)) or self._read(name)
            except FileNotFoundError:
                continue
            if info.modified is not None and newest - info.modified > ttl + 1.0:  # times are in whole seconds
                if tidy:
                    self._objects.delete(name)
                continue
            known[name, info.version] = reader, ttl
        self._known = known
        return [reader for reader, _ in known.values()]

    def _lock(self) -> ObjectInfo | None:
        try:
            return self._objects.info(LOCK_NAME)
        except FileNotFoundError:
            return None

    def _read(self, name: str) -> tuple[Reader, float]:
        text = self._objects.read(name)
        ttl = parse_holder(text[LEASE_DIGITS + 1 :]).get("ttl")
        return reader_of(name, text), ttl if isinstance(ttl, int | float) else float("inf")
