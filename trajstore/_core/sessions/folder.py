"""Reads the journals of all processes of a store."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from trajstore._core.files.descriptors import write_all
from trajstore._core.files.held import HeldFolder
from trajstore._core.sessions.records import (
    CALLS_FOLDER,
    HEAD_BYTES,
    SUFFIX,
    Record,
    decode_call,
    frames,
    payload,
    scan,
)
from trajstore._core.sessions.tree import Call
from trajstore.errors import CorruptStoreError, StoreLockedError

logger = logging.getLogger(__name__)

_PATIENCE, _PAUSE = 30.0, 0.002

OVER = ("discarded", "moved")
"""States of sessions of which nothing is left to do."""


@dataclass(slots=True)
class Recorded:
    """A session in a journal.

    Attributes:
        journal: name of the file.
        number: of the session in it.
        id: UUID, 32 hex digits.
        turn: number of journals in which it was before.
        fields: the fields that its rollouts share.
        opened: µs since 1970.
        is_whole: False while a process copies it from an earlier journal.
        state: ``open``, ``frozen``, ``finished``, ``discarded`` or ``moved``.
        finish: arguments of ``finish``.
        calls: number of its calls with tokens.
        gaps: ids of those whose tokens are unknown.
        tokens: number of their distinct tokens.
        last: time of its last record.
        places: where its calls are in the journal.
    """

    journal: str
    number: int
    id: str
    turn: int
    fields: dict[str, Any]
    opened: int
    is_whole: bool
    state: str = "open"
    finish: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    gaps: set[str] = field(default_factory=set)
    tokens: int = 0
    last: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Task and name, for messages."""
        return f"{self.fields['task_id']}/{self.fields['rollout_id']}"

    def note(self, record: Record) -> None:
        """Apply a record of this session."""
        fields = record.fields
        self.last = max(self.last, fields.get("at", 0))
        if "k" in fields:
            name = fields.get("c", str(fields["k"]))
            if "gap" in fields:
                self.gaps.add(name)
            else:
                self.calls += 1
                self.tokens += sum(fields["n"][:2])
                self.gaps.discard(name)
            self.places.append((record.begin, record.end))
        elif "finish" in fields:
            self.state, self.finish = "finished", fields["finish"]
        elif "state" in fields:
            self.state = fields["state"]
        elif "whole" in fields:
            self.is_whole = True


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session that is not in the store yet.

    Attributes:
        id: UUID, 32 hex digits.
        task_id: its task.
        rollout_id: its name within the task.
        state: ``open``, ``frozen``, or ``finished`` while the store's writer has not added its rollouts.
        calls: number of its calls with tokens.
        gaps: number of those whose tokens are unknown.
        tokens: number of their distinct tokens.
        opened: when it was opened, µs since 1970.
        last: when its newest call was added, µs since 1970.
        owner: the process that has it open; None if that ended, so that any other can continue it.
    """

    id: str
    task_id: str
    rollout_id: str
    state: str
    calls: int
    gaps: int
    tokens: int
    opened: int
    last: int
    owner: str | None


class JournalFile:
    """The records of one journal, read as it grows.

    Attributes:
        name: of the file, relative to the store.
        end: where its last whole record ends.
        head: its first record: store, process and host.
        sessions: its sessions by number.
        over: sessions of any journal whose rollouts are in the store, or that were dropped; by UUID.
        damaged: where damaged records begin.
    """

    def __init__(self, root: HeldFolder, name: str) -> None:
        self._root = root
        self.name = name
        self.end = 0
        self.head: dict[str, Any] = {}
        self.sessions: dict[int, Recorded] = {}
        self.over: set[str] = set()
        self.damaged: list[int] = []
        self._newest = 0, b""  # where the newest record begins, and its head

    def is_continued(self) -> bool:
        """Return whether the file has the records that were read. Those of a failed write are replaced by others."""
        begin, head = self._newest
        return self.read(begin, begin + len(head)) == head

    def read(self, begin: int, end: int | None = None) -> bytes:
        """Return bytes of the file."""
        with self._root.opened(self.name, os.O_RDONLY) as descriptor:
            return os.pread(descriptor, (os.fstat(descriptor).st_size if end is None else end) - begin, begin)

    def refresh(self) -> None:
        """Read the records that were appended."""
        if self.head and self.read(self.end, self.end + 1) == b"\0":
            return  # none: its process writes them in order, into zeros
        start, data = self.end, self.read(self.end)
        records, self.end, damaged = scan(data, start)
        if records:
            begin = records[-1].begin
            self._newest = begin, data[begin - start :][:HEAD_BYTES]
        for record in records:
            try:
                self._note(record)
            except (KeyError, TypeError, ValueError):
                damaged.append(record.begin)
        if damaged:
            self.damaged += damaged
            logger.warning(
                "%s/%s: the record at byte %d is damaged and left out; see `trajstore verify`",
                self._root.path,
                self.name,
                damaged[0],
            )

    def _note(self, record: Record) -> None:
        fields = record.fields
        if "journal" in fields:
            self.head = fields
        elif "open" in fields:
            self.sessions[fields["s"]] = Recorded(
                self.name,
                fields["s"],
                fields["open"],
                fields["turn"],
                fields["fields"],
                fields["at"],
                is_whole=not fields["turn"],
                last=fields["at"],
            )
        elif "over" in fields:
            self.over.add(fields["over"])
        else:
            self.sessions[fields["s"]].note(record)

    def calls(self, session: Recorded) -> list[Call]:
        """Return the calls of a session.

        Raises:
            CorruptStoreError: a record is damaged.
        """
        calls: list[Call] = []
        for begin, end in session.places:
            records, _, _ = scan(self.read(begin, end), begin)
            try:
                calls.append(decode_call(records[0], calls))
            except (CorruptStoreError, IndexError) as error:
                raise CorruptStoreError(
                    f"{self._root.path}/{self.name}: session {session.name}: "
                    f"a call before byte {end:,} is damaged or missing: {error}"
                ) from error
        return calls

    @property
    def owner(self) -> str | None:
        """The process that has the journal, if it is alive."""
        return f"process {self.head.get('pid')} on {self.head.get('host')}" if self.is_held() else None

    def is_held(self) -> bool:
        """Return whether a live process has the journal, by its ``flock``."""
        with suppress(FileNotFoundError), self._root.opened(self.name, os.O_RDONLY) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def sync(self) -> None:
        """Make what was read durable: its process may have been killed before it did so."""
        with self._root.opened(self.name, os.O_RDWR) as descriptor:
            os.fdatasync(descriptor)

    def move(self, session: Recorded) -> None:
        """Record that a session was copied to a later journal. The journal belongs to no process."""
        pieces = frames([payload({"s": session.number, "state": "moved"})])
        with self._root.opened(self.name, os.O_RDWR) as descriptor:
            os.ftruncate(descriptor, self.end)  # a torn record
            os.lseek(descriptor, self.end, os.SEEK_SET)
            write_all(descriptor, pieces)
            os.fdatasync(descriptor)
        self.refresh()


class CallsFolder:
    """The folder ``calls`` of a store. Not thread-safe: guarded by ``Sessions._lock``.

    Args:
        root: the store's folder.
        store_id: its UUID; journals of other stores are left out. None: read all.

    Attributes:
        files: the journals by name.
    """

    def __init__(self, root: HeldFolder, store_id: str | None) -> None:
        self._root = root
        self._store_id = store_id
        self._foreign: set[str] = set()
        self.files: dict[str, JournalFile] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which the processes of a store open sessions and delete journals.

        Raises:
            StoreLockedError: another process has held it for 30 seconds; each holds it for a moment.
        """
        self._root.make_folder(CALLS_FOLDER, shared=True)
        with self._root.opened(f"{CALLS_FOLDER}/lock", os.O_RDWR | os.O_CREAT) as descriptor:
            until = time.monotonic() + _PATIENCE
            while not _taken(descriptor):
                if time.monotonic() >= until:
                    raise StoreLockedError(
                        f"{self._root.path}/{CALLS_FOLDER}/lock: held for {_PATIENCE:g} s by another process, "
                        "perhaps a stopped one; `fuser` with this path names it"
                    )
                time.sleep(_PAUSE)
            yield

    def refresh(self) -> None:
        """Read what was appended to the journals since the last time."""
        names = self.names()
        for name in self.files.keys() - names:
            del self.files[name]
        for name in sorted(names - self._foreign):
            file = self.files.get(name) or JournalFile(self._root, name)
            with suppress(FileNotFoundError):  # deleted just now
                size = self._root.stat(name).st_size
                if size < file.end or not file.is_continued():
                    file = JournalFile(self._root, name)
                if size > file.end:
                    file.refresh()
                if self._store_id is not None and file.head.get("store_id", self._store_id) != self._store_id:
                    self._foreign.add(name)
                    logger.warning("%s/%s: belongs to another store, and is left alone", self._root.path, name)
                else:
                    self.files[name] = file

    def names(self) -> set[str]:
        """Return the names of the journals."""
        try:
            descriptor = self._root.open_folder(CALLS_FOLDER)
        except FileNotFoundError:
            return set()
        try:
            return {f"{CALLS_FOLDER}/{name}" for name in os.listdir(descriptor) if name.endswith(SUFFIX)}
        finally:
            os.close(descriptor)

    def remove(self, file: JournalFile) -> None:
        """Delete a journal."""
        with suppress(FileNotFoundError):
            self._root.unlink(file.name)
            self._root.sync(CALLS_FOLDER)  # before those that say what of it is over
        del self.files[file.name]

    def current(self) -> dict[str, Recorded]:
        """Return the sessions that are not over, by UUID, each of the newest journal that has all of it."""
        newest: dict[str, Recorded] = {}
        for session in self._all():
            if session.is_whole and session.turn >= getattr(newest.get(session.id), "turn", 0):
                newest[session.id] = session
        over = self.over()
        return {name: each for name, each in newest.items() if each.state not in OVER and name not in over}

    def listed(self) -> list[SessionInfo]:
        """Return the sessions that are not over, the oldest first."""
        self.refresh()
        owners = {file.name: file.owner for file in self.files.values()}
        return [
            SessionInfo(
                session.id,
                session.fields["task_id"],
                session.fields["rollout_id"],
                session.state,
                session.calls,
                len(session.gaps),
                session.tokens,
                session.opened,
                session.last,
                owners[session.journal],
            )
            for session in sorted(self.current().values(), key=lambda session: (session.opened, session.id))
        ]

    def over(self) -> set[str]:
        """Return the UUIDs of sessions that journals report to be in the store, or dropped."""
        return set().union(*(file.over for file in self.files.values()))

    def _all(self) -> Iterator[Recorded]:
        for file in self.files.values():
            yield from file.sessions.values()

    def removable(self) -> list[JournalFile]:
        """Return the journals that nothing needs, whether or not a process has them.

        A journal goes only after those that would bring its sessions back.
        """
        current = self.current()
        where: dict[str, list[Recorded]] = {}
        for session in self._all():
            if session.state != "moved":
                where.setdefault(session.id, []).append(session)
        return [file for file in self.files.values() if _is_removable(file, current, where)]


def _is_removable(file: JournalFile, current: Mapping[str, Recorded], where: Mapping[str, list[Recorded]]) -> bool:
    if any(each.journal != file.name for name in file.over for each in where.get(name, ())):
        return False
    for session in file.sessions.values():
        now = current.get(session.id)
        if now is not None and now.journal == file.name:
            return False
        if any(each.turn < session.turn for each in where.get(session.id, ())):
            return False
    return True


def _taken(descriptor: int) -> bool:
    """Take the lock of an open file, without waiting; return whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
