"""Sessions in the process that writes the store: adds the rollouts of finished ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trajstore._core.base import locks
from trajstore._core.buffer.content_watch import flatten_all
from trajstore._core.sessions.records import frame
from trajstore._core.sessions.rows import path_rows, row_uuids
from trajstore._core.sessions.session import Session
from trajstore._core.sessions.sessions import Sessions, local_directory
from trajstore._core.sessions.tree import CallTree
from trajstore.errors import PartlyAddedError

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
        self._to_commit: list[Session] = []  # their rollouts may not be durable yet

    def _check_rows(self, session: Session, tree: CallTree, finish: Mapping[str, Any]) -> None:
        flatten_all(path_rows(session.id, tree, session.fields, finish))

    def _add_rows(self, session: Session) -> list[int]:
        with self._adding:
            ids = session.row_ids
            rows = path_rows(session.id, CallTree(session.calls()), session.fields, session.outcome)
            if not rows:
                logger.warning("%r: has no calls with tokens, so it makes no rollout", session)
            if len(ids) < len(rows):
                uuids = row_uuids(session.id, len(rows))[16 * len(ids) :]
                try:
                    ids += self._sink.add_flattened(flatten_all(rows[len(ids) :]), uuids)
                except PartlyAddedError as error:
                    ids += error.ids
                    raise
                self._to_commit.append(session)
        super()._add_rows(session)
        return list(ids)

    def settle(self) -> None:
        """Record the sessions whose rollouts are durable.

        Raises:
            StoreWriteError: the journal could not be written.
        """
        with self._adding:
            committed = self._sink.committed
            done = [session for session in self._to_commit if session.row_ids[-1] <= committed]
            if done and self._journal is not None:
                self._journal.append(b"".join(frame({"taken": session.id}) for session in done))
                self._to_commit = [session for session in self._to_commit if session not in done]
