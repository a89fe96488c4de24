"""How a buffer learns what its writer did, without the writer's threads keeping the buffer alive.

All that the writer tells is told with ``CommitLog._lock`` held; ``Contents.lock`` is taken under it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trajstore.buffer.view import OWN_SOURCE, View
from trajstore.errors import StoreError
from trajstore.exits import forget
from trajstore.sampling.draws import Draws
from trajstore.store.moves import Moved
from trajstore.store.notes import Noted
from trajstore.writing.commits import Commit
from trajstore.writing.writer import StoreWriter

logger = logging.getLogger(__name__)


class ViewListener:
    """Brings commits and evictions of the buffer's own store into its view. The buffer holds it.

    Args:
        view: what is brought up to date.
        draws: its seed goes into the store's metadata.
        on_commit: the user's function; it may hold the buffer, so only the buffer may hold it.
    """

    def __init__(self, view: View, draws: Draws, on_commit: Callable[[Sequence[int]], None] | None) -> None:
        self.on_commit = on_commit
        self._view = view
        self._draws = draws
        self._committed = -1

    def metadata(self) -> Mapping[str, Any]:
        """Return what ``metadata.json`` shall say of the buffer."""
        return {"seed": self._draws.seed}

    def opened(self, newest: int) -> None:
        """Note that everything up to this id was committed before."""
        self._committed = newest

    def committed(self, commits: Sequence[Commit]) -> None:
        """Let these shards be read from disk."""
        self._committed = max(commit.ids[-1] for commit in commits)
        for commit in commits:
            self._view.contents.committed(OWN_SOURCE, commit.row, commit.ids, commit.columns)

    def rejected(self, ids: Sequence[int]) -> None:
        """Show these no longer: they will never be on disk."""
        self._view.forget(ids)

    def to_evict(self) -> Sequence[int]:
        """Return the ids that the store shall delete; what was loaded from elsewhere is only forgotten."""
        return self._view.expire(self._committed)

    def evicted(self, ids: Sequence[int]) -> None:
        """Show these no longer."""
        self._view.forget(ids)

    def moved(self, moved: Moved) -> None:
        """Let these be read from where they are now."""
        self._view.moved(moved)

    def noted(self, noted: Noted) -> None:
        """Show values that came late."""
        self._view.noted(noted)

    def replaced(self) -> None:
        """Show what the store has now instead of what it had."""
        self._view.show_own_again()

    def out_of_step(self, error: Exception) -> None:
        """Show nothing any more."""
        self._view.out_of_step = error


class WeakListener:
    """What the writer holds: passes everything on while the buffer, and with it the listener, lives."""

    def __init__(self, listener: ViewListener) -> None:
        self._listener = weakref.ref(listener)

    def metadata(self) -> Mapping[str, Any]:
        """Return what ``metadata.json`` shall say of the buffer; nothing of one that is gone."""
        listener = self._listener()
        return {} if listener is None else listener.metadata()

    def committed(self, commits: Sequence[Commit]) -> None:
        listener = self._listener()
        if listener is not None:
            listener.committed(commits)

    def rejected(self, ids: Sequence[int]) -> None:
        listener = self._listener()
        if listener is not None:
            listener.rejected(ids)

    def on_commit(self, ids: Sequence[int]) -> None:
        """Call the user's function with the ids of a commit."""
        listener = self._listener()
        if listener is not None and listener.on_commit is not None:
            listener.on_commit(ids)

    def to_evict(self) -> Sequence[int]:
        listener = self._listener()
        return [] if listener is None else listener.to_evict()

    def evicted(self, ids: Sequence[int]) -> None:
        listener = self._listener()
        if listener is not None:
            listener.evicted(ids)

    def moved(self, moved: Moved) -> None:
        listener = self._listener()
        if listener is not None:
            listener.moved(moved)

    def noted(self, noted: Noted) -> None:
        listener = self._listener()
        if listener is not None:
            listener.noted(noted)

    def replaced(self) -> None:
        listener = self._listener()
        if listener is not None:
            listener.replaced()

    def out_of_step(self, error: Exception) -> None:
        listener = self._listener()
        if listener is not None:
            listener.out_of_step(error)


def close_quietly(writer: StoreWriter) -> None:
    """Close the writer of a buffer that nobody closed; errors can only be logged by then."""
    if writer.is_own_thread():  # it held the last reference, while telling of a commit
        threading.Thread(target=close_quietly, args=(writer,), name="trajstore-close").start()
        return
    try:
        writer.close()
    except StoreError as error:
        logger.error("%s", error)
    forget(writer)
