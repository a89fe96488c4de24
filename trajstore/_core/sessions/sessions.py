"""Opens the sessions of a store, in any process of its machine."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from trajstore._core.base import locks
from trajstore._core.base.arguments import check_kind, path_or_url
from trajstore._core.base.clock import microseconds
from trajstore._core.files.base import Directory
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import open_directory
from trajstore._core.sessions.journal import CallJournal
from trajstore._core.sessions.records import CALLS_FOLDER, frame, plain
from trajstore._core.sessions.session import Session, check_metadata
from trajstore._core.sessions.tree import CallTree
from trajstore._core.store.sealed import METADATA_NAME, parse_metadata
from trajstore._core.writing.opening import check_not_mirror
from trajstore.errors import ConfigurationError, InvalidCallError, InvalidTrajectoryError, StoreNotFoundError, written

_LOCK = f"{CALLS_FOLDER}/lock"


class Sessions:
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
        except FileNotFoundError as error:
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
        self._journal: CallJournal | None = None
        self._known: dict[tuple[str, str], Session] = {}

    def session(
        self,
        task_id: str,
        rollout_id: str = "",
        *,
        query: str = "",
        data_id: str = "",
        tokenizer_fingerprint: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """Open a session, or continue an open one of the same ``task_id`` and ``rollout_id``.

        Args:
            task_id: its task: rollouts of one task are a group.
            rollout_id: its name within the task; empty for a new session, which is named by its UUID.
            query: the user's request.
            data_id: row of a dataset.
            tokenizer_fingerprint: identifies tokenizer and chat template.
            metadata: any JSON, for its rollouts; all but the key ``session``.

        Raises:
            InvalidCallError: a value cannot be stored, or differs from that of the open session.
            StoreLockedError: another process that is alive has this session open.
            StoreWriteError: it could not be recorded.
        """
        texts = {"task_id": task_id, "rollout_id": rollout_id, "query": query, "data_id": data_id}
        texts["tokenizer_fingerprint"] = tokenizer_fingerprint
        for name, value in texts.items():
            check_kind(name, value, str, "a text")
        check_kind("metadata", metadata, Mapping, "a dict")
        try:
            fields = plain({**texts, "metadata": dict(metadata or {})})
        except InvalidTrajectoryError as error:
            raise InvalidCallError(f"session {task_id}/{rollout_id}: {error}") from error
        check_metadata(fields["metadata"])
        if self._journal is not None:
            self._journal.check()
        with self._lock:
            session = self._known.get((task_id, rollout_id)) if rollout_id else None
            if session is not None and not session.is_finished:
                _check_fields(session, fields)
                return session
            with written(": the session was not opened"), self._opening():
                session = self._opened(fields)
            self._known[session.task_id, session.rollout_id] = session
            return session

    def _opened(self, fields: dict[str, Any]) -> Session:
        """Record a new session; the caller holds the locks."""
        session_id = uuid.uuid4().hex
        fields["rollout_id"] = fields["rollout_id"] or session_id
        if self._journal is None:
            self._journal = CallJournal(self._root, self._store_id)
        journal, number = self._journal, self._journal.opened
        journal.append(frame({"open": session_id, "s": number, "turn": 0, "at": microseconds(), "fields": fields}))
        journal.opened += 1
        return Session(journal, number, session_id, fields, self._add_rows, self._check_rows)

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Hold the lock under which the processes of a store open sessions."""
        self._root.make_folder(CALLS_FOLDER, shared=True)
        with self._root.opened(_LOCK, os.O_RDWR | os.O_CREAT) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def _add_rows(self, session: Session) -> list[int]:
        """Forget a finished session; add its rollouts, if this process writes the store."""
        with self._lock:
            if self._known.get((session.task_id, session.rollout_id)) is session:
                del self._known[session.task_id, session.rollout_id]
        return []

    def _check_rows(self, session: Session, tree: CallTree, finish: Mapping[str, Any]) -> None:
        """Refuse a session whose rollouts the store would refuse."""

    def close(self) -> None:
        """Release the journal. Open sessions stay; any process can open and continue them."""
        with self._lock:
            if self._journal is not None and os.getpid() == self._pid:
                self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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


def _check_fields(session: Session, fields: Mapping[str, Any]) -> None:
    """Refuse given values that differ from those with which an open session was opened."""
    differ = [name for name, value in fields.items() if value and value != session.fields[name]]
    if differ:
        raise InvalidCallError(
            f"session {session.task_id}/{session.rollout_id}: is open with another {', '.join(differ)}; omit them to "
            "continue it, or use another rollout_id"
        )
