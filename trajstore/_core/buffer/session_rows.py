"""Sessions in the process that writes the store: adds the rollouts of finished ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajstore._core.base import locks
from trajstore._core.base.clock import microseconds
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.buffer.content_watch import flatten_all
from trajstore._core.sessions.folder import Recorded
from trajstore._core.sessions.records import payload
from trajstore._core.sessions.rows import path_rows, row_uuids
from trajstore._core.sessions.session import Session
from trajstore._core.sessions.sessions import Sessions, local_directory
from trajstore._core.sessions.tree import Call, CallTree
from trajstore._core.store.run_ids import ID_LIMIT
from trajstore.errors import (
    CorruptStoreError,
    InvalidTrajectoryError,
    PartlyAddedError,
    StoreClosedError,
    StoreError,
    counted,
    listed,
)

if TYPE_CHECKING:
    from trajstore._core.buffer.sink import StoreSink

logger = logging.getLogger(__name__)


class BufferSessions(Sessions):
    """The sessions of a buffer's own store.

    Args:
        sink: of the buffer.
        store_id: UUID of the store.
    """

    def __init__(self, sink: StoreSink, store_id: str) -> None:
        self._begin(local_directory(sink.writer.directory), store_id)
        self._sink = sink
        self._adding = locks.lock("BufferSessions._adding")
        self._ids: dict[str, list[int]] = {}  # of rollouts whose session is not recorded as over yet, by session
        self._whole: set[str] = set()  # of these sessions, those of which all rollouts were added
        self._failed: list[Session] = []  # finished here, and not added yet
        self._damaged: set[str] = set()
        self._told = ""

    def _add_rows(self, session: Session) -> list[int]:
        super()._add_rows(session)
        if session.state != "finished":
            return []
        with self._adding:
            if session.row_ids is None:
                if session not in self._failed:
                    self._failed.append(session)
                session.row_ids = self._add(session.id, session.calls(), session.fields, session.outcome)
                self._failed.remove(session)
            return list(session.row_ids)

    def _add(
        self, session_id: str, calls: Sequence[Call], fields: Mapping[str, Any], finish: Mapping[str, Any]
    ) -> list[int]:
        """Add those rollouts of a session that the store lacks; return the ids of all."""
        rows = path_rows(session_id, CallTree(calls), fields, finish)
        if not rows:
            logger.warning(
                "session %s/%s: has no calls with tokens, so it makes no rollout",
                fields["task_id"],
                fields["rollout_id"],
            )
        ids = self._ids.setdefault(session_id, [])
        if len(ids) < len(rows):
            uuids = row_uuids(session_id, len(rows))[16 * len(ids) :]
            self._keep_from(self._sink.counter)
            try:
                ids += self._sink.add_flattened(flatten_all(rows[len(ids) :]), uuids)
            except PartlyAddedError as error:
                ids += error.ids
                raise
        self._whole.add(session_id)
        return ids

    def _keep_from(self, following: int) -> None:
        """Exempt rollouts from the retention until their sessions are over: a crash would bring evicted ones back."""
        self._sink.keep_from(min((ids[0] for ids in self._ids.values() if ids), default=following))

    def take_in(self) -> None:
        """Add the rollouts of sessions that other processes finished, and record those that are durable.

        Raises:
            StoreWriteError: rollouts could not be added, or a journal not be written.
            OSError: the journals cannot be read.
        """
        for failed in list(self._failed):
            self._add_rows(failed)
        with self._adding:
            finished = self._finished_elsewhere()
            for session in finished:
                if session.id not in self._ids:
                    self._ids[session.id] = self.row_ids(session.id, session.calls)
            for session in finished:
                self._take(session)
            self._settle()

    def _finished_elsewhere(self) -> list[Recorded]:
        """Return the finished sessions in journals of other processes that were not added yet."""
        with self._lock:
            self._folder.refresh()
            finished = [
                session
                for session in self._folder.current().values()
                if session.state == "finished"
                and session.journal not in self._journals
                and session.id not in self._whole | self._damaged
            ]
            for name in dict.fromkeys(session.journal for session in finished):
                self._folder.files[name].sync()  # else a power loss could open a session again whose rollouts are here
            return finished

    def _take(self, session: Recorded) -> None:
        """Add the rollouts of a session in a journal, unless the store has them."""
        try:
            with self._lock:
                calls = self._folder.files[session.journal].calls(session)
            self._add(session.id, calls, session.fields, session.finish)
        except (CorruptStoreError, InvalidTrajectoryError) as error:
            self._damaged.add(session.id)
            self._ids.pop(session.id, None)
            logger.warning("%s: no rollout was made of a session, whose calls stay: %s", self._root.path, error)

    def row_ids(self, session_id: str, count: int) -> list[int]:
        """Return the ids of those of the first ``count`` rollouts of a session that the store has."""
        return self._sink.ids_of(row_uuids(session_id, count))

    def _settle(self) -> None:
        """Record the sessions whose rollouts are durable, and delete journals that nothing needs."""
        committed = self._sink.committed
        done = [name for name in self._whole if max(self._ids[name], default=-1) <= committed]
        with self._lock:
            if not (done or self._abandoned() or self._folder.removable()):
                return
            with self._folder.locked():
                self._folder.refresh()
                dropped = self._abandoned()
                if over := [*done, *(session.id for session in dropped)]:
                    self._journal().append(*(payload({"over": name}) for name in over))
                if dropped:
                    logger.warning(
                        "%s: %s dropped, without a call for more than %g s and without a process: %s",
                        self._root.path,
                        counted(len(dropped), "open session", "is", "are"),
                        self._sink.abandoned_after,
                        listed(session.name for session in dropped),
                    )
                self._tidy()
        for name in done:
            del self._ids[name]
            self._whole.remove(name)
        if done:
            self._keep_from(ID_LIMIT)
            self._sink.retain()

    def _abandoned(self) -> list[Recorded]:
        """Return the open sessions beyond the retention's limit; the caller holds the lock."""
        limit = self._sink.abandoned_after
        if limit is None:
            return []
        before, files = microseconds() - int(limit * 1e6), self._folder.files
        return [
            session
            for session in self._folder.current().values()
            if session.state in ("open", "frozen") and session.last < before and not files[session.journal].is_held()
        ]

    def look(self) -> None:
        """Do as :meth:`take_in`; a failure is logged once and retried at the next call."""
        try:
            uninterrupted(self.take_in)
            self._told = ""
        except StoreClosedError:
            pass
        except (StoreError, OSError) as error:
            if str(error) != self._told:
                self._told = str(error)
                logger.warning("%s: finished sessions could not be taken in: %s", self._root.path, error)
