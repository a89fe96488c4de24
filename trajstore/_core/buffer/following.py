"""Keeps samplers up to date with a buffer's contents. Called with ``Contents.lock`` held."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from trajstore._core.buffer.view import View
from trajstore._core.reading.contents import Contents
from trajstore._core.sampling.base import Additions, Sampler
from trajstore._core.sampling.selection import rearrange
from trajstore._core.store.index import TrajectoryIndex
from trajstore.errors import ConfigurationError, listed

_VIEWS: weakref.WeakKeyDictionary[Sampler, weakref.ref[View]] = weakref.WeakKeyDictionary()
"""The view that each sampler follows; not in the sampler, which is sent between processes."""


def claim(sampler: Sampler, view: View) -> None:
    """Make a sampler follow a view from now on.

    Raises:
        ConfigurationError: it follows another one, whose ids name other trajectories.
    """
    reference = _VIEWS.get(sampler)
    before = None if reference is None else reference()
    if before is not None and before is not view and not before.released:
        mine, its = set(view.store_ids), set(before.store_ids)
        if not mine & its:
            raise ConfigurationError(
                f"sampler: it follows another buffer ({_shown_stores(its)}) than this one ({_shown_stores(mine)}), "
                "where the same ids name other trajectories; make a sampler for each buffer"
            )
    _VIEWS[sampler] = weakref.ref(view)


def _shown_stores(store_ids: set[str]) -> str:
    return f"store {listed(sorted(store_ids))}" if store_ids else "in memory"


class Following:
    """Keeps one sampler up to date with contents. Use it with the lock of the contents held.

    Additions and evictions of the oldest cost time in proportion to their number. Evictions from the middle and
    replaced contents compare all ids, which costs no more than the change itself.
    """

    def __init__(self, sampler: Sampler, view: View) -> None:
        self._sampler = sampler
        self._view = view
        self._index: weakref.ref[TrajectoryIndex] | None = None
        self._givers: tuple[frozenset[str], bool] = frozenset(), True
        self._revision = -1
        self._first = self._end = 0
        self._unavailable = range(0)

    def is_behind(self, contents: Contents) -> bool:
        """Return whether the sampler needs an update."""
        return self._is_replaced(contents.index) or self._shown(contents) != (self._first, self._end, self._unavailable)

    def _is_replaced(self, index: TrajectoryIndex) -> bool:
        return self._index is None or self._index() is not index or self._revision != index.revision

    @staticmethod
    def _shown(contents: Contents) -> tuple[int, int, range]:
        return max(contents.index.first, contents.start), contents.index.end, contents.unavailable

    def sync(self, contents: Contents) -> None:
        """Update the sampler with the changes since the last call."""
        if not self.is_behind(contents):
            return
        index = contents.index
        ids = index.at("trajectory_id", slice(None))
        first, end, unavailable = self._shown(contents)
        if self._is_replaced(index):
            self._forget_others(contents)
            positions = _without(np.arange(first, end), unavailable)
            # A rank's commit that is seen after younger ones of other ranks comes before them.
            rearrange(self._sampler, ids[positions], lambda same: self._add(contents, positions[same:]))
        else:
            lost = _without(np.arange(unavailable.start, min(unavailable.stop, self._end)), self._unavailable)
            self._sampler.evicted(np.concatenate([ids[self._first : min(first, self._end)], ids[lost]]))
            self._add(contents, _without(np.arange(max(self._end, first), end), unavailable))
        self._index, self._revision = weakref.ref(index), index.revision
        self._first, self._end, self._unavailable = first, end, unavailable
        self._givers = self._view.givers(contents)

    def _forget_others(self, contents: Contents) -> None:
        """Evict everything from the sampler, if ids may now name other trajectories."""
        before, gave_all = self._givers
        replaced = self._index is not None and self._index() is not contents.index
        if replaced and not (gave_all and before <= self._view.givers(contents)[0]):
            self._sampler.evicted(self._sampler.ids)

    def _add(self, contents: Contents, positions: npt.NDArray[np.intp]) -> None:
        if len(positions):
            self._sampler.added(additions_at(self._view, contents, positions, self._sampler.needs_tasks))


def additions_at(view: View, contents: Contents, positions: npt.NDArray[np.intp], tasks: bool) -> Additions:
    """Return what samplers learn of trajectories; call with the lock of ``contents`` held.

    Args:
        view: that shows the contents.
        contents: of the buffer.
        positions: of the trajectories, ``[n]``.
        tasks: also read their tasks and sessions.
    """
    columns = ("trajectory_id", "num_samples", "version_high")
    ids, samples, versions = (contents.index.at(name, positions).astype(np.int64) for name in columns)
    texts = contents.texts_of("task", positions) if tasks else None
    sessions = contents.sessions_of(positions) if tasks else None
    return Additions(ids, samples, versions, texts, view.names_at(contents, positions), sessions)


def _without(positions: npt.NDArray[np.intp], unavailable: range) -> npt.NDArray[np.intp]:
    return positions[(positions < unavailable.start) | (positions >= unavailable.stop)] if unavailable else positions
