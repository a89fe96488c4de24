"""Draws of a buffer: who chooses (the buffer's own generator, or a sampler), and the rows that were chosen, read.

Samplers are told and asked with ``Contents.lock`` held, which every method takes itself; rows are copied without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.buffer.numbering import Numbering, number
from trajstore.buffer.view import View
from trajstore.columns.fields import nest
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError, listed
from trajstore.reading.batch import Prepared
from trajstore.reading.contents import Contents
from trajstore.reading.slots import UNAVAILABLE
from trajstore.reading.tokens import TokenRows, token_rows
from trajstore.sampling.base import Additions, Drawn, IntArray, Sampler
from trajstore.sampling.draws import Draws, Window
from trajstore.sampling.weighted import WeightedSampler
from trajstore.store.index import TrajectoryIndex
from trajstore.trajectory import AnyTrajectory


class Batch(dict[str, Any]):
    """A batch that a sampler drew: the nested dict of tensors, and which rows they are.

    Attributes:
        drawn: ids, places and importance weights of the rows, in the order of the batch.
    """

    def __init__(self, values: Mapping[str, Any], drawn: Drawn) -> None:
        super().__init__(values)
        self.drawn = drawn

    @property
    def weights(self) -> torch.Tensor | None:
        """Importance weight of each row, float32 ``[n]``; None if the sampler gives none."""
        return None if self.drawn.weights is None else torch.from_numpy(self.drawn.weights)


_VIEWS: weakref.WeakKeyDictionary[Sampler, weakref.ref[View]] = weakref.WeakKeyDictionary()
"""Which view each sampler was told of last; not in the sampler, which travels between processes."""


def _claim(sampler: Sampler, view: View) -> None:
    """Note that a sampler follows a view from now on.

    Raises:
        ConfigurationError: it follows another one, whose ids stand for other trajectories.
    """
    reference = _VIEWS.get(sampler)
    before = None if reference is None else reference()
    if before is not None and before is not view and not before.released:
        mine, its = set(view.store_ids), set(before.store_ids)
        if not mine & its:
            raise ConfigurationError(
                f"sampler: it follows another buffer ({_shown_stores(its)}) than this one ({_shown_stores(mine)}), "
                "where its ids are those of other trajectories; make a sampler for each buffer"
            )
    _VIEWS[sampler] = weakref.ref(view)


def _shown_stores(store_ids: set[str]) -> str:
    return f"store {listed(sorted(store_ids))}" if store_ids else "in memory"


class Following:
    """Keeps one sampler told of what contents hold. Use it with the lock of the contents held.

    Additions, and the leaving of the oldest, cost what they are. Where entries leave from the middle, or contents are
    replaced, all ids are compared, which costs no more than the leaving itself did.
    """

    def __init__(self, sampler: Sampler, view: View) -> None:
        self._sampler = sampler
        self._view = view
        self._index: weakref.ref[TrajectoryIndex] | None = None
        self._revision = -1
        self._first = self._end = 0
        self._gap = range(0)

    def sync(self, contents: Contents) -> None:
        """Tell the sampler what has changed since the last time."""
        index = contents.index
        ids = index.at("trajectory_id", slice(None))
        first = max(index.first, contents.start)
        if self._index is None or self._index() is not index or self._revision != index.revision:
            positions = _without(np.arange(first, index.end), contents.gap)
            known = self._sampler.ids
            self._sampler.evicted(np.setdiff1d(known, ids[positions]))
            self._add(contents, positions[~np.isin(ids[positions], known)])
        elif (first, index.end, contents.gap) != (self._first, self._end, self._gap):
            lost = _without(np.arange(contents.gap.start, min(contents.gap.stop, self._end)), self._gap)
            self._sampler.evicted(np.concatenate([ids[self._first : min(first, self._end)], ids[lost]]))
            self._add(contents, _without(np.arange(max(self._end, first), index.end), contents.gap))
        self._index, self._revision = weakref.ref(index), index.revision
        self._first, self._end, self._gap = first, index.end, contents.gap

    def _add(self, contents: Contents, positions: npt.NDArray[np.intp]) -> None:
        if not len(positions):
            return
        names = ("trajectory_id", "num_samples", "version_high")
        ids, samples, versions = (contents.index.at(name, positions).astype(np.int64) for name in names)
        tasks = [contents.task_of(at) for at in positions.tolist()] if self._sampler.needs_tasks else None
        self._sampler.added(Additions(ids, samples, versions, tasks, self._view.names_at(contents, positions)))


def _without(positions: npt.NDArray[np.intp], gap: range) -> npt.NDArray[np.intp]:
    return positions[(positions < gap.start) | (positions >= gap.stop)] if gap else positions


class Choices:
    """Draws from a view and reads what was drawn.

    Args:
        view: what the buffer shows.
        draws: the buffer's generator, from which samplers take their chance too.
    """

    def __init__(self, view: View, draws: Draws) -> None:
        self._view = view
        self._draws = draws
        self._following: weakref.WeakKeyDictionary[Sampler, Following] = weakref.WeakKeyDictionary()

    def draw(self, count: int, window_size: int, sampler: Sampler | None) -> Drawn:
        """Return rows of the window; how many and which is the sampler's to say.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        return self._view.locked(lambda contents: self._draw(contents, count, window_size, sampler))

    def _draw(self, contents: Contents, count: int, window_size: int, sampler: Sampler | None) -> Drawn:
        window = Window.newest(contents.index, window_size, contents.gap, contents.start)
        ids = contents.index.at("trajectory_id", slice(None))
        if sampler is None:
            ends = contents.index.ends
            places = self._draws.samples(window, count) + contents.index.samples_before(window.first)
            positions = np.searchsorted(ends[: window.end], places, side="right")
            samples = places - ends[positions] + contents.index.at("num_samples", positions)
            return Drawn(ids[positions], samples)
        self._follow(contents, sampler)
        narrowed = len(window) < len(contents.index)
        first = int(ids[window.first if window.gap.start > window.first else window.gap.stop]) if narrowed else None
        return sampler.draw(count, self._draws.generator, first)

    def _follow(self, contents: Contents, sampler: Sampler) -> None:
        following = self._following.get(sampler)
        if following is None:
            _claim(sampler, self._view)
            following = self._following[sampler] = Following(sampler, self._view)
        following.sync(contents)

    def read(
        self, drawn: Drawn, columns: Sequence[str] | None, out: Mapping[str, torch.Tensor] | None
    ) -> dict[str, Any]:
        """Return the transitions that were drawn, as :meth:`TrajectoryReplayBuffer.sample` does.

        Raises:
            TrajectoryUnavailableError: one of them has been evicted meanwhile.
            ConfigurationError: a place lies outside its trajectory.
        """
        return nest(self._view.locked(lambda contents: self._prepare(contents, drawn, columns)).read(out))

    def _prepare(self, contents: Contents, drawn: Drawn, columns: Sequence[str] | None) -> Prepared:
        index = contents.index
        positions = self._positions(contents, drawn.ids)
        sizes = index.at("num_samples", positions)
        if np.any((drawn.samples < 0) | (drawn.samples >= sizes)):
            raise ConfigurationError("drawn rows: a place lies outside its trajectory")
        first = index.first
        samples = index.ends[positions] - sizes - index.samples_before(first) + drawn.samples
        return contents.prepare(samples, first, index.end, columns)

    def numbering(self, ids: IntArray) -> Numbering:
        """Return the numbers of the first samples of trajectories."""
        return self._view.locked(lambda contents: number(contents.index, ids))

    def numbered(
        self,
        numbering: Numbering,
        numbers: IntArray,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
    ) -> dict[str, Any] | None:
        """Return transitions by number; None if the numbers are of what was shown before."""

        def prepare(contents: Contents) -> Prepared | None:
            index = contents.index
            return contents.prepare(numbers, index.first, index.end, columns) if numbering.holds(index) else None

        prepared = self._view.locked(prepare)
        return None if prepared is None else nest(prepared.read(out))

    def readable(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether each of these trajectories can be read: neither evicted nor unavailable."""

        def look(contents: Contents) -> npt.NDArray[np.bool_]:
            positions = contents.index.find_many(ids)
            found: npt.NDArray[np.bool_] = (positions >= 0) & (contents.index.at("slot", positions) != UNAVAILABLE)
            return found

        return self._view.locked(look)

    def tokens(self, ids: IntArray, columns: Sequence[str] | None) -> TokenRows:
        """Return the token columns of agent trajectories, ready to be copied.

        Raises:
            TrajectoryUnavailableError: one of them has been evicted meanwhile.
            SchemaMismatchError: one is no agent trajectory, or lacks a column.
        """
        return self._view.locked(lambda found: token_rows(found, self._positions(found, ids), columns))

    def trajectories(self, count: int, window_size: int, sampler: Sampler) -> list[AnyTrajectory]:
        """Draw whole trajectories and return them.

        Raises:
            EmptyBufferError: there is nothing to draw from.
            ConfigurationError: the sampler draws transitions.
        """
        if sampler.unit != "trajectory":
            raise ConfigurationError("this sampler draws transitions; make it with unit='trajectory', or call sample")

        def draw(contents: Contents) -> list[AnyTrajectory]:
            drawn = self._draw(contents, count, window_size, sampler)
            return [contents.get(position) for position in self._positions(contents, drawn.ids).tolist()]

        return self._view.locked(draw)

    def sample(
        self,
        count: int,
        window_size: int,
        sampler: Sampler,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
    ) -> Batch:
        """Draw transitions with a sampler and return them.

        Raises:
            EmptyBufferError: there is nothing to draw from.
            ConfigurationError: the sampler draws trajectories.
        """
        if sampler.unit != "sample":
            raise ConfigurationError("this sampler draws whole trajectories; call sample_trajectories with it")

        def draw(contents: Contents) -> tuple[Drawn, Prepared]:
            drawn = self._draw(contents, count, window_size, sampler)
            return drawn, self._prepare(contents, drawn, columns)

        drawn, prepared = self._view.locked(draw)
        return Batch(nest(prepared.read(out)), drawn)

    def follow(self, sampler: Sampler) -> None:
        """Tell a sampler of what is shown now."""
        self._view.locked(lambda contents: self._follow(contents, sampler))

    def names(self, ids: IntArray) -> IntArray:
        """Return the names of trajectories; 0 for those that are not shown, or have none."""

        def look(contents: Contents) -> IntArray:
            positions = contents.index.find_many(ids)
            there = positions >= 0
            found = np.zeros(len(positions), np.int64)
            found[there] = self._view.names_at(contents, positions[there])
            return found

        return self._view.locked(look)

    def extents(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return T and B of trajectories."""

        def look(contents: Contents) -> tuple[IntArray, IntArray]:
            positions = self._positions(contents, ids)
            steps, batch = (contents.index.at(name, positions).astype(np.int64) for name in ("steps", "batch"))
            return steps, batch

        return self._view.locked(look)

    def update(self, sampler: WeightedSampler, drawn: Drawn, priorities: npt.ArrayLike) -> int:
        """Give rows that a sampler drew new priorities; return how many of them have been evicted meanwhile."""

        def update(contents: Contents) -> int:
            self._follow(contents, sampler)
            return sampler.update(drawn.ids, drawn.samples, priorities)

        return self._view.locked(update)

    def _positions(self, contents: Contents, ids: IntArray) -> npt.NDArray[np.int64]:
        positions = contents.index.find_many(ids)
        if len(positions) and positions.min() < 0:
            number = int(ids[positions.argmin()])
            raise TrajectoryUnavailableError(f"trajectory {number} was drawn and has been evicted since; draw again")
        return positions
