"""How a buffer learns what its writer did, without the writer's threads keeping the buffer alive.

All that the writer tells is told with ``CommitLog._lock`` held; ``Contents.lock`` is taken under it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from trajstore.core.buffer.view import OWN_SOURCE, View
from trajstore.core.sampling.draws import Draws
from trajstore.core.store.moves import Moved
from trajstore.core.store.notes import Noted
from trajstore.core.writing.commits import Commit, CommitListener


class ViewListener(CommitListener):
    """Brings commits and evictions of the buffer's own store into its view, for as long as somebody has that.

    Args:
        view: what is brought up to date. It may be held by the buffer alone: with it, what it shows goes.
        draws: its seed goes into the store's metadata.
    """

    def __init__(self, view: View, draws: Draws) -> None:
        self._view = weakref.ref(view)
        self._draws = draws
        self._committed = -1

    def metadata(self) -> Mapping[str, Any]:
        return {"seed": self._draws.seed}

    def opened(self, newest: int) -> None:
        """Note that everything up to this id was committed before."""
        self._committed = newest

    def committed(self, commits: Sequence[Commit]) -> None:
        self._committed = max(commit.ids[-1] for commit in commits)
        if (view := self._view()) is not None:
            for commit in commits:
                view.contents.committed(OWN_SOURCE, commit.row, commit.ids, commit.columns)

    def rejected(self, ids: Sequence[int]) -> None:
        self.evicted(ids)

    def to_evict(self) -> Sequence[int]:
        """Return the ids that the store shall delete; what was loaded from elsewhere is only forgotten."""
        view = self._view()
        return () if view is None else view.expire(self._committed)

    def evicted(self, ids: Sequence[int]) -> None:
        if (view := self._view()) is not None:
            view.forget(ids)

    def moved(self, moved: Moved) -> None:
        if (view := self._view()) is not None:
            view.moved(moved)

    def noted(self, noted: Noted) -> None:
        if (view := self._view()) is not None:
            view.noted(noted)

    def replaced(self) -> None:
        if (view := self._view()) is not None:
            view.show_own_again()

    def out_of_step(self, error: Exception) -> None:
        if (view := self._view()) is not None:
            view.out_of_step = error

    def on_commit(self, ids: Sequence[int]) -> None:
        """Call the user's function with the ids of a commit, holding nothing of the buffer meanwhile."""
        view = self._view()
        call = None if view is None else view.on_commit
        del view
        if call is not None:
            call(ids)
