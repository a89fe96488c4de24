"""The writer lock of a directory in an object store; fences off a writer that lost it."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import uuid
from typing import Any

import orjson

from trajstore._core.base import locks
from trajstore._core.base.interrupts import start_thread
from trajstore._core.files.base import WriterLock
from trajstore._core.files.holder import LOCK_NAME, describe_holder, holder_document, parse_holder, process_may_live
from trajstore.errors import StoreLockedError, WriterFencedError
from trajstore.remote.answers import ConflictError, Stamped
from trajstore.remote.object_store import ObjectStore

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
"""Attempts to take a contended lock; the loser finds a live holder next time."""


class RemoteWriterLock(WriterLock):
    """An object that names the writer, with a heartbeat every third of its time to live and a mark once released.

    Each change is a conditional PUT: only one of several contenders gets a free lock, and the heartbeat of a holder
    that lost it fails. The lock expires when its last heartbeat is older than its time to live, by the store's clock
    (by both machines' clocks where the store reports no times), or when its holder was a process of this machine that
    is dead.

    On a server without conditions (detected, with a warning) two processes that start within one round trip can both
    believe that they hold it, until the next heartbeat of one.

    A holder that is cut off for longer than its time to live must not write: :meth:`check` raises until it finds the
    lock unchanged, and for good once another process has taken it.

    Raises:
        StoreLockedError: another process holds it; names process, host and time.
    """

    def __init__(self, objects: ObjectStore, ttl: float, *, brief: bool = False) -> None:
        self._objects = objects
        self._ttl = ttl
        self._pid = os.getpid()
        self._document = {
            **holder_document(brief=brief),
            "pid_namespace": _pid_namespace(),
            "token": uuid.uuid4().hex,
            "ttl": ttl,
        }
        self._mutex = locks.lock("RemoteWriterLock._mutex")
        self._version = ""
        self._taken_by: bytes | None = None
        self._released = threading.Event()
        self._renewed = now()
        took_over = self._take()
        self._find_conditions()
        if took_over and not self._objects.keeps_match:
            time.sleep(min(1.0, ttl / 4))  # on a race for an expired lock the last writer wins
            self.confirm()
        self._thread = threading.Thread(target=self._keep, name="trajstore-writer-lock", daemon=True)
        start_thread(self._thread)

    def check(self) -> None:
        """Check the lock as far as this process knows; renew an overdue heartbeat. Does nothing after release.

        Raises:
            WriterFencedError: another process has the lock.
            StoreLockedError: it could not be renewed, so another process may have it.
        """
        if self._released.is_set():
            return
        if self._taken_by is not None:
            raise self._lost(self._taken_by)
        if self.is_late:
            try:
                self._renew()
            except WriterFencedError:
                raise
            except OSError as error:
                raise StoreLockedError(
                    f"{self._objects.url}: the writer's lock could not be renewed for {self._ttl:g} s, so others may "
                    f"have taken it; check that the store can be reached ({error})"
                ) from error

    @property
    def is_late(self) -> bool:
        """Whether the last heartbeat is so old that others may have taken the lock."""
        return now() - self._renewed > self._ttl

    def confirm(self) -> None:
        """Check the lock in the store. Does nothing after release.

        Raises:
            WriterFencedError: another process has it.
            OSError: the request failed.
        """
        if self._released.is_set():
            return
        self._confirmed()

    def _confirmed(self) -> str:
        """Return the version of the lock, after checking that it is still held.

        Raises:
            WriterFencedError: another process has it.
        """
        holder = self._holder()
        if holder is None or not self._is_ours(holder.data):
            self._taken_by = holder.data if holder is not None else b""
            raise self._lost(self._taken_by)
        return holder.version

    def release(self) -> None:
        if self._released.is_set() or os.getpid() != self._pid:
            return
        self._released.set()
        self._thread.join()
        try:
            if self._objects.keeps_match:
                if self._taken_by is None:
                    self._write(self._text(released=True))
            elif self._is_ours(self._objects.read(LOCK_NAME)):
                self._objects.delete(LOCK_NAME)  # without conditions, taking over a released lock is racy
        except FileNotFoundError:
            return
        except OSError as error:  # it expires
            logger.warning("the writer's lock could not be released: %s", error)

    # -- taking and keeping -----------------------------------------------------------------------

    def _take(self) -> bool:
        """Take the lock; return whether another process held it before."""
        for _ in range(_ATTEMPTS):
            started = now()
            if self._objects.create(LOCK_NAME, self._text()):
                self._version = self._objects.version(LOCK_NAME) or ""
                self._renewed = started
                return False
            holder = self._holder()
            if holder is None:
                continue
            if self._is_ours(holder.data):  # the response to a first attempt was lost
                self._version, self._renewed = holder.version, started
                return False
            if not _is_over(holder):
                raise self._refusal(holder.data)
            started = now()
            try:
                self._version = self._objects.put_if(LOCK_NAME, self._text(), holder.version)
            except ConflictError:
                continue
            self._renewed = started
            return True
        raise self._refusal(b"")

    def _find_conditions(self) -> None:
        """Probe which conditions the server enforces; warn of missing ones."""
        self._objects.probe(LOCK_NAME, self._text())
        if not (self._objects.keeps_create and self._objects.keeps_match):
            self._version = self._objects.version(LOCK_NAME) or ""  # the probe's request was carried out
        if self._objects.is_of_this_process:
            return  # all users of this store freeze together
        harm = {
            "If-None-Match": "the commit that it was sending can replace one of theirs",
            "If-Match": "it can replace their index, metadata, pins and lock",
        }
        kept = self._objects.keeps_create, self._objects.keeps_match
        for (condition, text), is_kept in zip(harm.items(), kept, strict=True):
            if not is_kept:
                logger.warning(
                    "%s: this object store does not seem to support %s, so a writer that was frozen for longer than "
                    "lock_ttl (%g s) while others took over is not stopped when it wakes: %s. It cannot replace "
                    "their shards",
                    self._objects.url,
                    condition,
                    self._ttl,
                    text,
                )

    def _keep(self) -> None:
        while not self._released.wait(self._ttl / 3):
            try:
                self._renew()
            except WriterFencedError:
                return
            except OSError as error:
                logger.warning("the writer's lock could not be renewed: %s", error)

    def _renew(self) -> None:
        """Write a heartbeat.

        Raises:
            WriterFencedError: another process has the lock.
            OSError: the store cannot be reached.
        """
        with self._mutex:
            started = now()
            if not self._objects.keeps_match:
                self.confirm()
            self._write(self._text())
            self._renewed = started

    def _write(self, text: bytes) -> None:
        """Write the lock if it is still held.

        Raises:
            WriterFencedError: another process has it.
        """
        for _ in range(_ATTEMPTS):
            try:
                self._version = self._objects.put_if(LOCK_NAME, text, self._version)
                return
            except ConflictError:
                self._version = self._confirmed()  # the response to an earlier attempt was lost
        raise OSError(errno.EBUSY, "the lock keeps changing", self._objects.url_of(LOCK_NAME))

    def _holder(self) -> Stamped | None:
        """Return the lock; None if absent."""
        try:
            return self._objects.stamped(LOCK_NAME)
        except FileNotFoundError:
            return None

    def _text(self, *, released: bool = False) -> bytes:
        if released:  # for older versions, a lock that expired long ago
            return orjson.dumps({**self._document, "heartbeat": 0, "released": True})
        return orjson.dumps({**self._document, "heartbeat": time.time()})

    def _is_ours(self, holder: bytes) -> bool:
        return parse_holder(holder).get("token") == self._document["token"]

    def _refusal(self, holder: bytes) -> StoreLockedError:
        wait = f"wait {self._ttl:g} s or " if "ttl" in parse_holder(holder) else ""  # an uploaded lock has none
        return StoreLockedError(
            f"{self._objects.url} is being written by {describe_holder(holder)}; close that writer, or open the "
            f"directory for reading (if no such process runs, {wait}delete {LOCK_NAME})",
            brief=parse_holder(holder).get("brief") is True,
        )

    def _lost(self, holder: bytes) -> WriterFencedError:
        released = parse_holder(holder).get("released") is True
        return WriterFencedError(
            f"{self._objects.url} was taken over while this writer was cut off: it {'was' if released else 'is being'} "
            f"written by {describe_holder(holder)}. This writer can no longer write. Its acknowledged trajectories "
            "are in the store, the others are not: close it, open the store again when it is free, and add the "
            "others again"
        )


def now() -> float:
    """Return a monotonic time in seconds that includes suspension of the machine."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def is_held(objects: ObjectStore) -> bool:
    """Return whether the lock of a directory is held, according to its text.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return not _is_over(objects.stamped(LOCK_NAME))
    except FileNotFoundError:
        return False


def holder_of(objects: ObjectStore) -> dict[str, Any]:
    """Return the fields of a directory's lock, expired or not; empty if it was released.

    Raises:
        OSError: it cannot be read.
    """
    try:
        document = parse_holder(objects.read(LOCK_NAME))
    except FileNotFoundError:
        return {}
    return {} if document.get("released") is True else document


def _is_over(holder: Stamped) -> bool:
    """Return whether a lock was released or has expired, or its holder is known to be dead."""
    document = parse_holder(holder.data)
    if not holder.data or document.get("released") is True:  # empty: of a closed local store that was uploaded
        return True
    try:
        ttl, heartbeat = float(document["ttl"]), float(document["heartbeat"])
        # Stores report write times in whole seconds.
        if (holder.age - 1.0 if holder.age is not None else time.time() - heartbeat) > ttl:
            return True
    except (KeyError, TypeError, ValueError, OverflowError):
        pass  # of an uploaded local store, or unknown: nobody renews it, so its age says nothing
    here = holder_document()["host"], _pid_namespace()
    is_here = here[1] is not None and (document.get("host"), document.get("pid_namespace", here[1])) == here
    return is_here and not process_may_live(document)


def _pid_namespace() -> int | None:
    """Return the PID namespace, which distinguishes containers of one host."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
