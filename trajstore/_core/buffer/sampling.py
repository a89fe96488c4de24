"""Draws by the buffer's generator or a sampler, and rows of trajectories by arrays of ids.

Samplers are called with ``Contents.lock`` held, which every method acquires itself; rows are copied without it.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import check_instance, check_kind, columns_or_none, whole_numbers
from trajstore._core.base.extensions import extension
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.following import Following, additions_at, claim
from trajstore._core.buffer.positions import Positions
from trajstore._core.buffer.view import View
from trajstore._core.columns.fields import nest
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.reading.address_table import UNAVAILABLE
from trajstore._core.reading.contents import Contents
from trajstore._core.reading.plan import RowPlan
from trajstore._core.reading.tokens import TokenRows, token_rows
from trajstore._core.sampling.base import Additions, Drawn, Fits, Sampler
from trajstore._core.sampling.draws import Draws, Window
from trajstore._core.sampling.selection import Selection
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError, UnknownColumnError

if TYPE_CHECKING:
    from trajstore.query import Query
    from trajstore.query.reader import Queries

T = TypeVar("T")


_SAMPLER = "a sampler of trajstore._core.sampling (sampler_of makes one of a dict)"


class Batch(dict[str, Any]):
    """A batch that a sampler drew: the nested dict of tensors, and the rows drawn.

    Attributes:
        drawn: ids, places, importance weights, probabilities and uses of the rows, in the order of the batch.
    """

    def __init__(self, values: Mapping[str, Any], drawn: Drawn) -> None:
        super().__init__(values)
        self.drawn = drawn

    @property
    def weights(self) -> torch.Tensor | None:
        """Importance weight of each row, float32 ``[n]``; None if the sampler gives none."""
        return None if self.drawn.weights is None else torch.from_numpy(self.drawn.weights)


def check_sampler(sampler: Sampler) -> None:
    """Refuse anything but a sampler.

    Raises:
        ConfigurationError: it is something else.
    """
    check_instance("sampler", sampler, Sampler, _SAMPLER)


def check_unit(sampler: Sampler, unit: str, otherwise: str) -> None:
    """Refuse a sampler that draws another unit.

    Raises:
        ConfigurationError: ``otherwise``.
    """
    check_sampler(sampler)
    if sampler.unit != unit:
        raise ConfigurationError(otherwise)


def _check_fits(sampler: Sampler) -> None:
    parameters = inspect.signature(sampler.draw).parameters.values()
    if not any(parameter.name == "fits" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ConfigurationError(
            f"sampler: {type(sampler).__name__}.draw has no argument fits=, the filter for rows that begin a "
            "whole sequence; add it as in Sampler.draw, or use pad=True"
        )


class Sampling:
    """Draws from a view, and reads by arrays of ids. For loaders and Ray's stores; may change with any release.

    Args:
        view: the trajectories shown.
        draws: the buffer's generator, which samplers use too.
    """

    def __init__(self, view: View, draws: Draws) -> None:
        self._view = view
        self._draws = draws
        self._queries: Queries | None = None
        self._own_name = f"memory {uuid4()}"
        self._within: int | None = None
        """The thread inside a call of :meth:`together`."""
        self._following: weakref.WeakKeyDictionary[Sampler, Following] = weakref.WeakKeyDictionary()

    @property
    def generator(self) -> torch.Generator:
        """Generator of all draws; part of ``state_dict``."""
        return self._draws.generator

    def continue_draws(self) -> None:
        """Continue the draws of the process that this buffer comes from; see :meth:`Draws.continue_here`."""
        self._draws.continue_here()

    def draw(self, count: int, window_size: int, sampler: Sampler | None, fits: Fits | None = None) -> Drawn:
        """Draw rows of the window, only those that fit; a sampler decides which and how many.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        return self.together(sampler, lambda contents: self.choose(contents, count, window_size, sampler, fits)[0])

    def together(self, sampler: Sampler | None, call: Callable[[Contents], T]) -> T:
        """Call with the contents, their lock held and the sampler up to date; ``call`` may draw and read more."""
        check_kind("sampler", sampler, Sampler, _SAMPLER)
        if sampler is None:
            return self._view.locked(call)
        follower = sampler.selection or sampler
        if isinstance(follower, Selection):
            self._evaluate(follower)

        def tell_and_call(contents: Contents) -> T:
            self._follow(contents, follower)
            return call(contents)

        def call_if_told(contents: Contents) -> tuple[T] | None:
            following = self._following.get(follower)
            return None if following is None or following.is_behind(contents) else (within(contents),)

        def within(contents: Contents) -> T:
            self._within = threading.get_ident()
            try:
                return tell_and_call(contents)
            finally:
                self._within = None

        if self._within == threading.get_ident():  # it holds the lock, so another thread would deadlock
            return self._view.locked(tell_and_call)
        done = self._view.locked(call_if_told)
        # An interrupt would leave a sampler updated by half; in this thread the next draw waits for it.
        return uninterrupted(lambda: self._view.locked(within)) if done is None else done[0]

    def query(self, relation: str) -> Query:
        """Return a query over the trajectories, see :meth:`Reader.query`."""
        if self._queries is None:
            queries = extension("queries").Queries
            self._queries = cast("Queries", queries(self._view.locked, self._view.directories_by_rank))
        return self._queries.query(relation)

    def unknown_column(self, selection: Selection) -> str:
        """Return words on a column of the condition that does not exist, unless a late value gets its name; or "".

        Raises:
            ConfigurationError: the condition is invalid, whatever columns there will be.
        """
        try:
            self._evaluate(selection)
        except UnknownColumnError as error:
            return f" ({error})"
        return ""

    def _evaluate(self, selection: Selection) -> None:
        """Update the matching ids, unless the facts are the same. Without the lock: Polars' threads may need it."""
        if selection.where is None or self._within == threading.get_ident():
            return
        query = self.query("trajectories")
        facts = query.facts()
        if facts is not selection.seen:
            selection.match(query.where(selection.where).ids(), facts)

    def choose(
        self, contents: Contents, count: int, window_size: int, sampler: Sampler | None, fits: Fits | None = None
    ) -> tuple[Drawn, IntArray]:
        """Draw rows within :meth:`together`, see :meth:`draw`; return also the positions of their trajectories.

        Raises:
            TrajectoryUnavailableError: the sampler drew a trajectory that the buffer lacks.
        """
        window = Window.newest(contents.index, window_size, contents.unavailable, contents.start)
        ids = contents.index.at("trajectory_id", slice(None))
        if sampler is None:
            drawn, positions = self._uniformly(contents, count, window, fits)
        else:
            narrowed = len(window) < len(contents.index)
            first = int(ids[window.first if window.gap.start > window.first else window.gap.stop]) if narrowed else None
            if fits is None:  # custom samplers may lack the argument
                drawn = sampler.draw(count, self._draws.generator_for(sampler), first)
            else:
                _check_fits(sampler.inner if isinstance(sampler, Selection) else sampler)
                drawn = sampler.draw(count, self._draws.generator_for(sampler), first, fits=fits)
            positions = self.positions_of_rows(contents, drawn)
        names = self._view.names_at(contents, positions)
        return replace(drawn, buffer=self.names()[0], names=names), positions

    def _uniformly(self, contents: Contents, count: int, window: Window, fits: Fits | None) -> tuple[Drawn, IntArray]:
        index, kept, still_wanted = contents.index, [], count
        while still_wanted > 0:
            wanted = still_wanted if fits is None else min(still_wanted, max(1, window.samples))
            positions, samples = index.find_rows(self._draws.samples(window, wanted), window.first, window.end)
            ids = index.at("trajectory_id", positions)
            good = slice(None) if fits is None else fits(ids, samples)
            kept.append((ids[good], samples[good], positions[good]))
            still_wanted = 0 if fits is None else still_wanted - len(kept[-1][0])
        ids, samples, positions = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        chance = None if fits is not None else np.full(len(ids), 1 / window.samples)
        return Drawn(ids, samples, probabilities=chance), positions

    def names(self) -> list[str]:
        """Return the names that identify draws of this buffer: UUIDs of its stores, or a random one in memory."""
        return self._view.store_ids or [self._own_name]

    def _follow(self, contents: Contents, sampler: Sampler) -> None:
        following = self._following.get(sampler)
        if following is None:
            claim(sampler, self._view)
            following = self._following[sampler] = Following(sampler, self._view)
        following.sync(contents)

    def plan(self, contents: Contents, drawn: Drawn, columns: Sequence[str] | None) -> RowPlan:
        """Return a plan for copying drawn rows.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted since, or its id now names a shorter one.
            ConfigurationError: a row number is negative.
        """
        positions = self.present(contents, drawn)
        return contents.plan(positions, contents.rows_of(positions, drawn.samples), contents.index.first, columns)

    def present(self, contents: Contents, drawn: Drawn) -> IntArray:
        """Return the positions of drawn rows' trajectories, after checking that they are the drawn ones.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted since, or its id now names another one.
            ConfigurationError: a row number is negative.
        """
        positions = self.positions_of_rows(contents, drawn)
        if np.any(others := self._are_others(contents, drawn, positions)):
            raise TrajectoryUnavailableError(
                f"trajectory {shown_id(int(drawn.ids[others.argmax()]))} was drawn, but since a load another one has "
                "its id; draw again"
            )
        return positions

    def _are_others(self, contents: Contents, drawn: Drawn, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the drawn rows whose id names another trajectory since contents were replaced."""
        if drawn.names is None:
            return np.zeros(len(positions), np.bool_)
        now = self._view.names_at(contents, positions)
        both_named = (now != 0) & (drawn.names != 0)
        elsewhere = drawn.buffer is not None and drawn.buffer not in self.names()
        return np.where(both_named, now != drawn.names, elsewhere)

    def locate(self, trajectory_ids: IntArray) -> Positions:
        """Return the positions of trajectories, for repeated reads of them."""
        return self._view.locked(lambda contents: Positions.of(contents.index, trajectory_ids))

    def read_at(
        self,
        known: Positions,
        positions: IntArray,
        places: IntArray,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any] | None:
        """Return transitions as :meth:`read` does; None if trajectories have left: call :meth:`locate` again.

        Args:
            known: result of :meth:`locate`.
            positions: of the rows' trajectories, ``[n]``.
            places: of the rows among the valid ones of their trajectories, ``[n]``.
            columns: dotted names of the columns wanted; None = all.
            out: tensors to fill, by dotted name.

        Raises:
            SchemaMismatchError: the trajectories differ in their columns.
            TrajectoryUnavailableError: one was in memory only, and has left it.
        """

        def plan(contents: Contents) -> RowPlan | None:
            index = contents.index
            if not known.hold(index):
                return None
            return contents.plan(positions, contents.rows_of(positions, places), index.first, columns)

        values = self._view.locked(plan)
        return None if values is None else nest(values.read(out))

    def origins(self, drawn: Drawn) -> tuple[IntArray, IntArray]:
        """Return the row ``t * B + b`` and the newest policy version (-1 = unknown) of each drawn row, both ``[n]``.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted since.
        """

        def look(contents: Contents) -> tuple[IntArray, IntArray]:
            positions = self.present(contents, drawn)
            versions = contents.index.at("version_high", positions)
            return contents.rows_of(positions, drawn.samples), np.where(versions == UNKNOWN_VERSION, -1, versions)

        return self._view.locked(look)

    def readable(self, trajectory_ids: npt.NDArray[np.int64] | Drawn) -> npt.NDArray[np.bool_]:
        """Return whether each of these trajectories can be read: neither evicted nor unavailable.

        For drawn rows (``batch.drawn``) also whether the ids still name the same trajectories, as after another load.
        """
        drawn = trajectory_ids
        if not isinstance(drawn, Drawn):
            ids = whole_numbers("trajectory_ids", drawn)
            drawn = Drawn(ids, np.zeros(len(ids), np.int64))

        def look(contents: Contents) -> npt.NDArray[np.bool_]:
            positions = contents.index.find_many(drawn.ids)
            found: npt.NDArray[np.bool_] = positions >= 0
            found[found] = contents.index.at("slot", positions[found]) != UNAVAILABLE
            found[found] = ~self._are_others(contents, drawn.at(found), positions[found])
            return found

        return self._view.locked(look)

    def described(self, ids: IntArray, tasks: bool) -> Additions:
        """Return what samplers learn of those of these trajectories that are present; ``tasks`` is the costly part."""

        def look(contents: Contents) -> Additions:
            positions = contents.index.find_many(ids)
            return additions_at(self._view, contents, positions[positions >= 0], tasks)

        return self._view.locked(look)

    def revision(self) -> Any:
        """Return a value that changes whenever a trajectory is evicted or becomes unavailable, or after a load."""
        return self._view.locked(
            lambda found: (found.index, found.index.revision, found.index.first, found.unavailable)
        )

    def token_rows(self, trajectory_ids: IntArray, columns: Sequence[str] | None = None) -> TokenRows:
        """Return the token columns of agent trajectories, ready to be copied into batches of tokens.

        Raises:
            TrajectoryUnavailableError: one of them has been evicted meanwhile.
            SchemaMismatchError: one is not an agent trajectory, or lacks a column.
        """
        ids, columns = whole_numbers("trajectory_ids", trajectory_ids), columns_or_none(columns)
        return self._view.locked(lambda found: token_rows(found, self.positions(found, ids), columns))

    def names_of(self, trajectory_ids: IntArray) -> IntArray:
        """Return the first half of each trajectory's UUID, which sampler states use to recognise trajectories.

        0 for those that are not shown, and for all whose UUIDs are new in each process: in memory only, and in RLinf's
        directories.
        """
        ids = whole_numbers("trajectory_ids", trajectory_ids)

        def look(contents: Contents) -> IntArray:
            positions = contents.index.find_many(ids)
            there = positions >= 0
            names = np.zeros(len(positions), np.int64)
            names[there] = self._view.names_at(contents, positions[there])
            return names

        return self._view.locked(look)

    def extents(self, trajectory_ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return T and B of some trajectories, each ``[n]``.

        Raises:
            TrajectoryUnavailableError: one of them is not in the buffer.
        """
        ids = whole_numbers("trajectory_ids", trajectory_ids)

        def look(contents: Contents) -> tuple[IntArray, IntArray]:
            positions = self.positions(contents, ids)
            steps, batch = (contents.index.at(name, positions).astype(np.int64) for name in ("steps", "batch"))
            return steps, batch

        return self._view.locked(look)

    def positions_of_rows(self, contents: Contents, drawn: Drawn) -> npt.NDArray[np.int64]:
        """Return the positions of drawn rows' trajectories, after checking that they can be read.

        Raises:
            TrajectoryUnavailableError: a trajectory was evicted since, or its id now names a shorter one.
            ConfigurationError: a row number is negative.
        """
        positions = self.positions(contents, drawn.ids)
        if np.any(drawn.samples < 0):
            raise ConfigurationError("drawn rows: a place is negative")
        if np.any(beyond := drawn.samples >= contents.index.at("num_samples", positions)):
            raise TrajectoryUnavailableError(
                f"trajectory {shown_id(int(drawn.ids[beyond.argmax()]))}: a drawn row is beyond its end, "
                "because another one had this id before a load; draw again"
            )
        return positions

    def positions(self, contents: Contents, ids: IntArray) -> npt.NDArray[np.int64]:
        """Return the positions of trajectories in the index.

        Raises:
            TrajectoryUnavailableError: one was evicted since it was drawn.
        """
        positions = contents.index.find_many(ids)
        if len(positions) and positions.min() < 0:
            number = int(ids[positions.argmin()])
            raise TrajectoryUnavailableError(
                f"trajectory {shown_id(number)} was drawn and has been evicted since; draw again"
            )
        return positions
