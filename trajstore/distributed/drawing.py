"""The drawing half of a handle: the index of the stores, draws and reads."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base import locks
from trajstore._core.base.arguments import columns_or_none, transitions, whole
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.sampling import Batch
from trajstore._core.columns.fields import nest
from trajstore._core.sampling.base import Drawn, Ids, Sampler, Unit
from trajstore._core.sampling.draws import Draws
from trajstore._core.sampling.selection import Selection, selected
from trajstore._core.sampling.weighted import WeightedSampler
from trajstore.distributed.actors import SilentStoresError, Stores
from trajstore.distributed.index_sync import IndexSync
from trajstore.distributed.options import HandleOptions
from trajstore.distributed.reads import Reads
from trajstore.distributed.routes import Routes
from trajstore.distributed.run_index import RunIndex
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import (
    ConfigurationError,
    EmptyBufferError,
    StoreUnreachableError,
    TrajectoryUnavailableError,
    listed,
)
from trajstore.trajectory import AnyTrajectory

T = TypeVar("T")

_PAUSE = 0.05  # seconds before the first retry; doubles
_LONGEST_PAUSE = 1.0


class DrawingHandle:
    """Draws and reads of the trajectories of many stores. Users make a ``DistributedReplayBuffer``.

    Args:
        stores: the actors.
        routes: notified when stores answer.
        options: options of this handle.
    """

    def __init__(self, stores: Stores, routes: Routes, options: HandleOptions) -> None:
        self._stores = stores
        self._options = options
        self._lock = locks.rlock("DrawingHandle._lock")
        self._draws = Draws(options.seed)
        self._reads = Reads(stores)
        self._sync = IndexSync(stores, routes, options.refresh_interval, self._reads.renew)
        self._uniform: dict[Any, Selection] = {}
        self._closed = False
        self.sample_window_size = options.sample_window_size

    @property
    def _sampling(self) -> SamplingOfHandle:
        """Facts of trajectories for arrays of ids; used by loaders."""
        return SamplingOfHandle(self)

    @property
    def _grows(self) -> bool:
        """True: trajectories may be added to the stores."""
        return True

    @property
    def name(self) -> str:
        """Name of the buffer."""
        return self._stores.name

    @property
    def absent(self) -> list[int]:
        """Ranks of the stores that did not answer the last request."""
        with self._lock:
            return self._sync.index.absent

    @property
    def _share(self) -> tuple[int, int] | None:
        """Always None: a handle shows all trajectories of the stores."""
        return None

    @property
    def _store_ids(self) -> list[str]:
        """UUIDs of the responsive stores.

        Raises:
            StoreUnreachableError: a store has just stopped answering.
        """
        stores, absent = self._stores, self.absent
        return [stores.describe(rank).store_id for rank in stores.ranks if rank not in absent]

    def _all_ranks(self) -> list[int]:
        """Update the list of stores; return all ranks, including lost ones."""
        self._stores.look()
        return self._stores.all_ranks

    def _ask_present(self, arguments: Mapping[int, Sequence[Any]], method: str) -> dict[int, Any]:
        """Call those of these stores that are not excluded; return the answers by rank.

        A store without an answer for ``patience`` seconds is excluded from now on, with one warning.

        Raises:
            Exception: any other exception of a store.
        """
        with self._lock:
            absent = set(self._sync.index.absent)
        patience = min(self._options.patience, self._options.deadline)
        present = {rank: given for rank, given in arguments.items() if rank not in absent}
        answers, failed = self._stores.ask(present, method, patience)
        for rank, error in failed.items():
            if not isinstance(error, StoreUnreachableError):
                raise error
            with self._lock:
                self._sync.leave_out(rank, error)
        return answers

    def _with_copies(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return ids and those of the same trajectories in other stores, and for each its place in ``ids``.

        A request that was sent again to another store may be in both.
        """
        self.refresh()
        with self._lock:
            copies, places = self._sync.index.copies_of(np.asarray(ids, np.int64))
        return [*map(int, ids), *copies.tolist()], [*range(len(ids)), *places.tolist()]

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(f"the handle of {self._stores.name!r} is closed; connect again")

    # -- drawing ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Fetch additions and evictions from the stores.

        Draws exclude unresponsive stores, with one warning, until they answer again.
        """
        self._check_open()
        with self._lock:
            self._sync.refresh(True)

    def draw(
        self, num_chunks: int, *, sampler: Sampler | None = None, where: str | None = None, ids: Ids | None = None
    ) -> Drawn:
        """Choose transitions among the newest trajectories of all responsive stores, as a buffer does.

        If these stores have no trajectories, waits for the unresponsive ones.

        Raises:
            EmptyBufferError: all stores answer and none has a trajectory.
            StoreUnreachableError: no responsive store has a trajectory, and another did not answer for ``deadline``.
        """
        num_chunks, sampler = transitions(num_chunks), self._selected(sampler, where, ids)
        if sampler is not None:
            return self._chosen(num_chunks, sampler)
        with self._drawing(None) as index:
            return index.samples(num_chunks, self.sample_window_size, self._draws)

    def _selected(
        self, sampler: Sampler | None, where: str | None, ids: Ids | None, unit: Unit = "sample"
    ) -> Sampler | None:
        """Return the sampler for draws with these arguments, see :meth:`Reader.selected`."""
        return selected(sampler, where, ids, unit, self._uniform)

    @abstractmethod
    def _matching(self, where: str) -> IntArray:
        """Return the ids of the trajectories in the responsive stores that match a condition."""

    def _evaluate(self, selection: Selection) -> None:
        """Update the matching ids, unless the stores' trajectories are the same and were asked within the interval."""
        with self._lock:
            self._sync.refresh(False)
            revision = self._sync.index.revision
        before, asked = selection.seen if isinstance(selection.seen, tuple) else (-1, 0.0)
        now = time.monotonic()
        fresh = before == revision and now - asked < self._options.refresh_interval
        if selection.where is None or fresh:
            return
        selection.match(self._matching(selection.where), (revision, now))

    def _chosen(self, count: int, sampler: Sampler) -> Drawn:
        with self._drawing(sampler) as index:
            return sampler.draw(count, self._draws.generator_for(sampler), index.first_of(self.sample_window_size))

    @contextmanager
    def _drawing(self, sampler: Sampler | None) -> Iterator[RunIndex]:
        """Yield the index, with the lock held.

        If it is empty and a store does not answer (its actor is restarting), waits for that store first.

        Raises:
            StoreUnreachableError: the store has not answered for ``deadline``.
        """
        if isinstance(sampler, Selection):
            self._evaluate(sampler)
        until = time.monotonic() + self._options.deadline
        pause = _PAUSE
        while True:
            with self._lock:
                index = self._updated(sampler)
                if len(index) or not index.absent:
                    yield index
                    return
                absent = index.absent
            if time.monotonic() + pause >= until:
                raise StoreUnreachableError(
                    f"cannot sample: no answer from {listed(f'rank_{rank}' for rank in absent)} of "
                    f"{self._stores.name!r} for {self._options.deadline:.0f} s, and no other store has trajectories; "
                    "create() restarts lost stores"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _updated(self, sampler: Sampler | None) -> RunIndex:
        self._check_open()
        return self._sync.updated(None if sampler is None else sampler.selection or sampler)

    def read(
        self, drawn: Drawn, *, columns: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return transitions chosen by :meth:`draw`, in the format of :meth:`sample`.

        Stores whose directory is on this machine are read from memory-mapped files; the others are requested.

        Raises:
            TrajectoryUnavailableError: a drawn trajectory has been evicted.
            SchemaMismatchError: the trajectories differ in their columns.
            StoreUnreachableError: a store did not answer for ``patience``. Draw again: it is excluded from draws until
                it answers. If no other store has a trajectory, the limit is ``deadline``.
        """
        return nest(self._patiently(partial(self._reads.rows, drawn, columns_or_none(columns), out)))

    def _patiently(self, read: Callable[[float], T]) -> T:
        """Run a read with the time limit ``patience``, or ``deadline`` if no other store has trajectories.

        Raises:
            SilentStoresError: stores did not answer. Draws exclude them from now on.
            TrajectoryUnavailableError: a trajectory was evicted. Draws exclude it from now on.
        """
        patience = min(self._options.patience, self._options.deadline)
        try:
            try:
                return read(patience)
            except SilentStoresError as silent:
                with self._lock:
                    for rank, error in silent.failed.items():
                        self._sync.leave_out(rank, error)
                    if len(self._sync.index):
                        raise
            return read(max(_PAUSE, self._options.deadline - patience))
        except TrajectoryUnavailableError as error:
            if not isinstance(error, SilentStoresError):
                self.refresh()
            raise

    def _again(
        self,
        drawn: Drawn,
        sampler: Sampler | None,
        error: TrajectoryUnavailableError,
        whole: Collection[int] | None = None,
        count: int = 0,
    ) -> Drawn:
        """Return a draw whose rows could not be read, with new ones for those of silent stores and of evictions.

        Args:
            drawn: the draw.
            sampler: drew them, and draws the new ones.
            error: of the read.
            whole: the ids that were read already, for a draw of whole trajectories; None for one of transitions.
            count: number of groups asked of a sampler of groups, which draws all again: parts of draws are no groups.

        Raises:
            TrajectoryUnavailableError: nothing was evicted; ``error``.
            EmptyBufferError: nothing is left.
        """
        left = drawn.at(self._sampling.readable(drawn) | np.isin(drawn.ids, list(whole or ())))
        lacking = len(drawn) - len(left)
        if not lacking and isinstance(error, SilentStoresError):
            return drawn  # the stores answer again
        if not lacking:
            raise error
        if sampler is not None and sampler.in_groups:
            return self._whole(count, sampler)
        try:
            if whole is None:
                return Drawn.joined(left, self.draw(lacking, sampler=sampler))
            return Drawn.joined(left, self._whole(lacking, sampler, left.ids.tolist()))
        except EmptyBufferError:
            if not len(left) or (sampler is None and whole is None):
                raise
            return left  # the sampler is exhausted, or no other trajectory is left

    @overload
    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler,
        where: str | None = None,
        ids: Ids | None = None,
    ) -> Batch: ...
    @overload
    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler | None = None,
        where: str | None = None,
        ids: Ids | None = None,
    ) -> dict[str, Any]: ...
    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler | None = None,
        where: str | None = None,
        ids: Ids | None = None,
    ) -> dict[str, Any]:
        """Draw transitions and return them; see :meth:`TrajectoryReplayBuffer.sample`.

        A condition is evaluated again at most every ``refresh_interval`` seconds, or when trajectories came or went.

        If a store does not answer for ``patience``, its rows are drawn again from the others. Rows that are evicted
        before they are read are drawn again, too.

        Raises:
            EmptyBufferError, StoreUnreachableError: see :meth:`draw`.
            TrajectoryUnavailableError: a trajectory cannot be read, although it was not evicted.
            SchemaMismatchError: see :meth:`read`.
        """
        num_chunks, columns = transitions(num_chunks), columns_or_none(columns)
        sampler = self._selected(sampler, where, ids)
        if sampler is not None and sampler.unit != "sample":
            raise ConfigurationError("this sampler draws whole trajectories; call sample_trajectories with it")
        if sampler is None:
            with self._drawing(None) as index:
                table, places = index.table, index.places(num_chunks, self.sample_window_size, self._draws)
            try:
                return self._patiently(partial(self._reads.placed, table, places, columns, out))
            except TrajectoryUnavailableError as error:
                drawn = self._again(table.drawn(places), None, error)
        else:
            drawn = self.draw(num_chunks, sampler=sampler)
        while True:
            try:
                values = self.read(drawn, columns=columns, out=out)
            except TrajectoryUnavailableError as error:
                drawn = self._again(drawn, sampler, error)
            else:
                return values if sampler is None else Batch(values, drawn)

    def sample_trajectories(
        self, count: int, *, sampler: Sampler | None = None, where: str | None = None, ids: Ids | None = None
    ) -> list[AnyTrajectory]:
        """Draw whole trajectories without replacement (a sampler may repeat); all if ``count`` is larger.

        Raises:
            EmptyBufferError, StoreUnreachableError: see :meth:`draw`.
        """
        sampler = self._selected(sampler, where, ids, "trajectory")
        if sampler is not None and sampler.unit != "trajectory":
            raise ConfigurationError("this sampler draws transitions; make it with unit='trajectory'")
        drawn = self._whole(count, sampler)
        read: dict[int, AnyTrajectory] = {}
        while True:
            try:
                self._patiently(partial(self._reads.trajectories, drawn.ids.tolist(), read))
            except TrajectoryUnavailableError as error:
                drawn = self._again(drawn, sampler, error, read, count)
            else:
                return [read[number] for number in drawn.ids.tolist()]

    def _whole(self, count: int, sampler: Sampler | None, besides: Collection[int] = ()) -> Drawn:
        """Draw whole trajectories; without a sampler none of ``besides``, and all others if ``count`` is larger."""
        if sampler is not None:
            return self._chosen(count, sampler)
        with self._drawing(None) as index:
            ids = index.trajectories(count + len(besides), self.sample_window_size, self._draws)
        ids = ids[~np.isin(ids, list(besides))][:count]
        return Drawn(ids, np.zeros(len(ids), np.int64))

    def _update(self, sampler: Sampler, where: str | None, ids: Ids | None) -> None:
        """See :meth:`Sampler.follow`."""
        follower = self._selected(sampler, where, ids, sampler.unit)
        if isinstance(follower, Selection):
            self._evaluate(follower)
        with self._lock:
            self._updated(follower)
            if isinstance(follower, Selection):
                follower.apply()

    def update_priorities(self, sampler: WeightedSampler, drawn: Drawn, priorities: npt.ArrayLike) -> int:
        """Set the priorities of drawn rows; return the number of rows that were evicted meanwhile.

        Raises:
            ConfigurationError: the sampler has no priorities, or a priority is negative or not finite; nothing changed.
        """
        with self._lock:
            self._updated(sampler)
            return sampler.update(drawn.ids, drawn.samples, priorities)

    def get(self, trajectory_id: int) -> AnyTrajectory:
        """Return a copy of a trajectory, by id; see :meth:`TrajectoryReplayBuffer.get`.

        Raises:
            TrajectoryUnavailableError: no such trajectory.
            StoreUnreachableError: its store does not answer.
        """
        (copy,) = self._stores.call(trajectory_id % MOST_STORES, "trajectories", [trajectory_id])
        if copy is None:
            raise TrajectoryUnavailableError(
                f"no trajectory of {self._stores.name!r} has the id {trajectory_id}, or it was evicted"
            )
        trajectory: AnyTrajectory = copy
        return trajectory

    # -- looking ----------------------------------------------------------------------------------

    @property
    def sample_window_size(self) -> int:
        """Number of newest trajectories, over all stores, that draws are from; 0 = all."""
        return self._sample_window_size

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        self._sample_window_size = whole("sample_window_size", value, 0)

    @property
    def seed(self) -> int | None:
        """Seed of the generator."""
        return self._draws.seed

    @property
    def stores(self) -> list[int]:
        """Ranks of the stores, including lost ones."""
        return self._stores.all_ranks

    def nodes(self) -> dict[int, str]:
        """Return Ray's node id of each store, by rank.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        return {rank: self._stores.describe(rank).node for rank in self._stores.look_whole()}

    @property
    def size(self) -> int:
        """Number of trajectories in the responsive stores, as of the last :meth:`refresh`."""
        with self._lock:
            return len(self._sync.index)

    def __len__(self) -> int:
        return self.size

    @property
    def trajectory_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the trajectories in the responsive stores, oldest first, int64."""
        with self._lock:
            return self._sync.index.ids

    @property
    def total_samples(self) -> int:
        """Number of samples in the responsive stores, T·B summed."""
        with self._lock:
            return self._sync.index.table.total_samples

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories; asks the stores."""
        with self._lock:
            self._sync.refresh(self.size < min_size)
            return self.size >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories; asks the stores."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return the statistics of the responsive stores, summed.

        ``num_trajectories`` counts one that two stores have once. Adds ``stores``, the number of stores, and
        ``absent_stores``, the number of unresponsive ones.
        """
        total: dict[str, float] = {}
        self.refresh()
        for stats in self._ask_present(dict.fromkeys(self._stores.all_ranks, ()), "stats").values():
            for name, value in stats.items():
                total[name] = total.get(name, 0) + value
        with self._lock:
            if "num_trajectories" in total:
                total["num_trajectories"] -= len(self._sync.index.hidden)
            total["stores"] = len(self._stores.all_ranks)
            total["absent_stores"] = len(self._sync.index.absent)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws, for :meth:`load_state_dict`."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the draws."""
        self._draws.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class SamplingOfHandle:
    """Facts of trajectories by arrays of ids, like :class:`~trajstore._core.buffer.sampling.Sampling`.

    Args:
        _handle: the handle.
    """

    _handle: DrawingHandle

    def continue_draws(self) -> None:
        """Continue the draws of the process that the handle comes from."""
        self._handle._draws.continue_here()

    def readable(self, trajectory_ids: npt.NDArray[np.int64] | Drawn) -> npt.NDArray[np.bool_]:
        """Return for each trajectory whether it can be drawn, as of the last answers of the stores.

        Of drawn rows also those that :meth:`DrawingHandle.read` has read already, when it missed others.
        """
        ids = trajectory_ids.ids if isinstance(trajectory_ids, Drawn) else trajectory_ids
        with self._handle._lock:
            there = self._handle._updated(None).has(ids)
        if isinstance(trajectory_ids, Drawn):
            there |= self._handle._reads.keeps(trajectory_ids)
        return there

    def names_of(self, trajectory_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first half of each trajectory's UUID; 0 if it cannot be drawn."""
        with self._handle._lock:
            self._handle._updated(None)
            return self._handle._sync.names_of(trajectory_ids)

    def extents(self, trajectory_ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return T and B of trajectories, each ``[n]``.

        Raises:
            TrajectoryUnavailableError: a trajectory is absent.
            StoreUnreachableError: a store does not answer.
        """
        return self._handle._patiently(lambda seconds: self._handle._reads.extents(trajectory_ids))
