"""Opens the sessions of a store, in any process of its machine."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from trajstore._core.base import locks
from trajstore._core.base.arguments import path_or_url
from trajstore._core.base.clock import microseconds
from trajstore._core.files.base import Directory
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import open_directory
from trajstore._core.sessions.arguments import OpensSessions
from trajstore._core.sessions.folder import CallsFolder, Recorded, SessionInfo
from trajstore._core.sessions.journal import CallJournal
from trajstore._core.sessions.records import encode_call, payload
from trajstore._core.sessions.session import Session
from trajstore._core.sessions.tree import Call
from trajstore._core.store.sealed import METADATA_NAME, parse_metadata
from trajstore._core.writing.opening import check_not_mirror
from trajstore.errors import (
    ConfigurationError,
    InvalidCallError,
    StoreClosedError,
    StoreLockedError,
    StoreNotFoundError,
    TrajectoryUnavailableError,
    counted,
    listed,
    written,
)

logger = logging.getLogger(__name__)


class Sessions(OpensSessions[Session]):
    """The sessions of a store, for processes that do not write it themselves: gateways, workers. Thread-safe.

    The process that writes the store uses ``TrajectoryReplayBuffer.session``. Each process has a journal of its own in
    the store's folder ``calls``. The store must be on a local disk of this machine.

    Args:
        path: of the store, which exists.

    Raises:
        ConfigurationError: it is a URL, or a mirror.
        StoreNotFoundError: there is no store.
    """

    def __init__(self, path: str | Path) -> None:
        directory = open_directory(path_or_url("path", path))
        local = local_directory(directory)
        try:
            metadata = parse_metadata(local.read(METADATA_NAME), f"{local.url}/{METADATA_NAME}")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(
                f"{local.url}: no store; the process that writes it creates it: TrajectoryReplayBuffer(auto_save=True)"
            ) from error
        check_not_mirror(local)
        self._begin(local, str(metadata["store_id"]))

    def _begin(self, directory: LocalDirectory, store_id: str) -> None:
        self._root = directory.root
        self._store_id = store_id
        self._pid = os.getpid()
        self._lock = locks.lock("Sessions._lock")
        self._folder = CallsFolder(self._root, store_id)
        self._journals: dict[str, CallJournal] = {}
        self._known: dict[tuple[str, str], Session] = {}

    def _open_session(self, fields: dict[str, Any]) -> Session:
        task_id, rollout_id = fields["task_id"], fields["rollout_id"]
        self._check_process()
        with self._lock:
            session = self._known.get((task_id, rollout_id)) if rollout_id else None
            if session is not None and session.state in ("open", "frozen"):
                _check_fields(session.fields, fields)
                return session
            with written(": the session was not opened"), self._folder.locked():
                self._folder.refresh()
                found = self._find(task_id, rollout_id, ("open", "frozen")) if rollout_id else None
                had = len(self._journals)
                session = self._opened(fields) if found is None else self._continued(found, fields)
                if found is not None or len(self._journals) > had:
                    self._tidy()
            self._known[session.task_id, session.rollout_id] = session
            return session

    def _find(self, task_id: str, rollout_id: str, states: Collection[str]) -> Recorded | None:
        """Return the newest session of these names in one of these states."""
        found = [
            session
            for session in self._folder.current().values()
            if session.state in states
            and (session.fields["task_id"], session.fields["rollout_id"]) == (task_id, rollout_id)
        ]
        return max(found, key=lambda session: (session.opened, session.id), default=None)

    def _journal(self) -> CallJournal:
        """Return the journal for new sessions; the caller holds the locks."""
        for journal in self._journals.values():
            if not journal.is_full:
                journal.check()
                return journal
        journal = CallJournal(self._root, self._store_id)
        self._journals[journal.name] = journal
        return journal

    def _opened(self, fields: dict[str, Any]) -> Session:
        """Record a new session."""
        session_id = uuid.uuid4().hex
        fields["rollout_id"] = fields["rollout_id"] or session_id
        journal = self._journal()
        number = journal.next_number()
        begin = {"open": session_id, "s": number, "turn": 0, "at": microseconds(), "fields": fields}
        journal.append(payload(begin))
        return Session(journal, number, session_id, fields, self._add_rows)

    def _continued(self, found: Recorded, fields: dict[str, Any]) -> Session:
        """Copy an open session of a process that ended to the own journal."""
        file = self._folder.files[found.journal]
        if (owner := file.owner) is not None:
            raise StoreLockedError(
                f"{self._root.path}: session {found.name} is open in {owner}; add its calls there, or end that process"
            )
        _check_fields(found.fields, fields)
        calls, state, journal = file.calls(found), found.state, self._journal()
        number = journal.next_number()
        begin = {"open": found.id, "s": number, "turn": found.turn + 1, "at": found.opened, "fields": found.fields}
        records = [payload(begin), *(encode_call(call, number) for call in calls)]
        if state != "open":
            records.append(payload({"s": number, "at": found.last, "state": state}))
        journal.append(*records, payload({"s": number, "whole": 1}))
        with suppress(OSError):  # a full disk: the later turn counts
            file.move(found)
        return Session(journal, number, found.id, found.fields, self._add_rows, calls, state)

    def _tidy(self, *, closing: bool = False) -> None:
        """Delete journals that nothing needs and no other process has; the caller holds the locks.

        Args:
            closing: also the one for new sessions.
        """
        self._folder.refresh()
        removed = True
        while removed:  # some can go only after others
            removed = False
            for file in self._folder.removable():
                own = self._journals.get(file.name)
                if file.is_held() if own is None else not (closing or own.is_worth_deleting):
                    continue
                if own is not None:
                    self._journals.pop(file.name).close()
                self._folder.remove(file)
                removed = True

    def read(self, task_id: str, rollout_id: str) -> list[Call]:
        """Return the durable calls of a session, as added; also of one that another process has open.

        Sessions whose rollouts are in the store, and discarded ones, are not found.

        Raises:
            TrajectoryUnavailableError: there is no such session.
            CorruptStoreError: a call is damaged.
        """
        with self._lock:
            self._folder.refresh()
            found = self._find(task_id, rollout_id, ("open", "frozen", "finished"))
            if found is None:
                raise TrajectoryUnavailableError(f"{self._root.path}: no session {task_id}/{rollout_id} is open")
            return self._folder.files[found.journal].calls(found)

    def listed(self) -> list[SessionInfo]:
        """Return the sessions of all processes that are open, frozen, or finished and not yet in the store."""
        with self._lock:
            return self._folder.listed()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"{self._root.path}: these sessions belong to the parent process; make trajstore.Sessions here"
            )

    def _add_rows(self, session: Session) -> list[int]:
        """Forget a finished session; add its rollouts, if this process writes the store."""
        with self._lock:
            if self._known.get((session.task_id, session.rollout_id)) is session:
                del self._known[session.task_id, session.rollout_id]
        return []

    def close(self) -> None:
        """Release the journal. Open sessions stay; any process can open and continue them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            try:
                if self._journals:
                    with self._folder.locked():
                        self._tidy(closing=True)
            finally:  # else its sessions could not be opened elsewhere
                for journal in self._journals.values():
                    journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_sessions(path: str | Path) -> list[SessionInfo]:
    """Return the sessions of a store that it does not have as rollouts yet; none for one in an object store."""
    directory = open_directory(path)
    return CallsFolder(directory.root, None).listed() if isinstance(directory, LocalDirectory) else []


def named(sessions: Sequence[SessionInfo]) -> str:
    """Return the number and names of sessions, for a message."""
    names = listed(f"{session.task_id}/{session.rollout_id}" for session in sessions)
    return f"{counted(len(sessions), 'session')} not in the store yet ({names})"


def warn_of_open(path: str, what: str) -> None:
    """Warn of the sessions of a store that it does not have as rollouts yet.

    Args:
        path: path or URL of the store.
        what: happens to them; the message continues with their names.
    """
    try:
        sessions = open_sessions(path)
    except OSError as error:
        logger.warning("%s: its sessions cannot be read: %s", path, error)
    else:
        if sessions:
            logger.warning("%s: %s %s", path, what, named(sessions))


def local_directory(directory: Directory) -> LocalDirectory:
    """Return a store's directory.

    Raises:
        ConfigurationError: it is not on a local disk.
    """
    if not isinstance(directory, LocalDirectory):
        raise ConfigurationError(
            f"{directory.url}: sessions need a store on a local disk, because every call is appended to a file; use a "
            "local store with mirror=..., which copies finished rollouts to an object store"
        )
    return directory


def _check_fields(known: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuse given values that differ from those with which an open session was opened."""
    differ = [name for name, value in fields.items() if value and value != known[name]]
    if differ:
        raise InvalidCallError(
            f"session {known['task_id']}/{known['rollout_id']}: is open with another {', '.join(differ)}; omit them to "
            "continue it, or use another rollout_id"
        )
