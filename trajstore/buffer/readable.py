"""The half of the buffer that reads: what is shown, and draws from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import check_instance, check_kind, columns_or_none, one_of, whole
from trajstore.buffer.backing import Backing
from trajstore.buffer.internals import Internals
from trajstore.buffer.moved import OF_BUFFERS, Moved
from trajstore.buffer.view import View
from trajstore.columns.fields import nest
from trajstore.columns.limits import shown
from trajstore.errors import ConfigurationError
from trajstore.querying import RELATIONS, Facts, Query
from trajstore.querying.relations import TRAJECTORIES, scan
from trajstore.reading.contents import Contents
from trajstore.reading.plan import RowPlan
from trajstore.sampling.base import Drawn, Sampler
from trajstore.sampling.draws import Draws, Window
from trajstore.sampling.weighted import WeightedSampler
from trajstore.store.run_ids import id_from
from trajstore.trajectory import AnyTrajectory


class ReadableBuffer(Moved):
    """Trajectories that can be looked at and drawn from. Users make a ``TrajectoryReplayBuffer``.

    Args:
        view: what is shown.
        draws: the generator of the draws.
        backing: what stands behind the view.
        sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
    """

    _MOVED = OF_BUFFERS

    def __init__(self, view: View, draws: Draws, backing: Backing, sample_window_size: int) -> None:
        self._view = view
        self._draws = draws
        self._backing = backing
        self._internals = Internals(view, draws, backing)
        self._facts = Facts(view.locked, backing.keep_facts)
        self.sample_window_size = sample_window_size

    @property
    def sample_window_size(self) -> int:
        """Samples are drawn from this many newest trajectories; 0 = from all."""
        return self._sample_window_size

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        self._sample_window_size = whole("sample_window_size", value, 0)

    # -- sampling ---------------------------------------------------------------------------------

    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler | None = None,
    ) -> dict[str, Any]:
        """Draw transitions from the window of the newest trajectories, uniformly with replacement or by a sampler.

        Args:
            num_chunks: number of transitions, at least 1. Drawn without a sampler, more than the window has is cut to
                what it has, as RLinf's buffer does, with a warning once; a sampler that draws with replacement
                (:class:`~trajstore.sampling.WeightedSampler`) gives as many as asked for, however few there are.
            columns: dotted names of the columns wanted; None = all.
            out: tensors to fill, by dotted name; ``[>= num_chunks, ...]``, of the column's dtype.
            sampler: chooses the transitions; the same object each time, as it is told of what was added and evicted.

        Returns:
            A nested dict of tensors ``[num_chunks, ...]`` with keys and dtypes as they were added. With a sampler it
            is a :class:`~trajstore.buffer.choices.Batch`, which also says which rows it holds and how much each counts.

        Raises:
            ConfigurationError: an argument is out of range; names it.
            EmptyBufferError: there is nothing to sample from.
            SchemaMismatchError: a column is absent; trajectories of the window differ in theirs, or are agent ones,
                which :meth:`sample_trajectories` draws whole.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        num_chunks, columns = whole("num_chunks", num_chunks, 1), columns_or_none(columns)
        _check_out(out)
        if sampler is not None:
            return self._internals.sample(num_chunks, self.sample_window_size, sampler, columns, out)

        def draw(contents: Contents) -> RowPlan:
            window = Window.newest(contents.index, self.sample_window_size, contents.unavailable, contents.start)
            samples = self._draws.samples(window, num_chunks)
            positions, rows = contents.index.find_rows(samples, window.first, window.end)
            return contents.plan(positions, rows, window.first, columns)

        return nest(self._view.locked(draw).read(out))

    def sample_trajectories(self, count: int, *, sampler: Sampler | None = None) -> list[AnyTrajectory]:
        """Draw whole trajectories uniformly, without repetition, from the window; all if ``count`` is larger.

        Args:
            count: how many, at least 1; with a :class:`~trajstore.sampling.GroupSampler` how many tasks.
            sampler: chooses instead; one that draws whole trajectories.

        Raises:
            EmptyBufferError: there is nothing to sample from.
            ConfigurationError: ``count`` is less than 1, or the sampler draws transitions.
        """
        count = whole("count", count, 1)
        if sampler is not None:
            return self._internals.trajectories(count, self.sample_window_size, sampler)

        def draw(contents: Contents) -> list[AnyTrajectory]:
            window = Window.newest(contents.index, self.sample_window_size, contents.unavailable, contents.start)
            return [contents.get(position) for position in self._draws.trajectories(window, count)]

        return self._view.locked(draw)

    def draw(self, num_chunks: int, *, sampler: Sampler | None = None) -> Drawn:
        """Choose rows as :meth:`sample` does, without reading them; :meth:`read` reads them, also in another process.

        Raises:
            ConfigurationError: an argument is out of range; names it.
            EmptyBufferError: there is nothing to sample from.
        """
        return self._internals.draw(whole("num_chunks", num_chunks, 1), self.sample_window_size, sampler)

    def read(
        self, drawn: Drawn, *, columns: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return transitions that :meth:`draw` chose, as :meth:`sample` returns them.

        Raises:
            TrajectoryUnavailableError: one of their trajectories has been evicted since.
            SchemaMismatchError: their trajectories differ in their columns.
        """
        _check_drawn(drawn)
        _check_out(out)
        return self._internals.read(drawn, columns_or_none(columns), out)

    def follow(self, sampler: Sampler) -> None:
        """Tell a sampler of the trajectories that are here now, as the next draw would; before its state is loaded."""
        self._internals.follow(sampler)

    def update_priorities(self, sampler: WeightedSampler, drawn: Drawn, priorities: npt.ArrayLike) -> int:
        """Give rows that a sampler drew new priorities, and return how many of them have been evicted since.

        Args:
            sampler: the one that drew them.
            drawn: of the batch (``batch.drawn``).
            priorities: one for each row, at least 0: usually the absolute TD error. Of a tensor the values count,
                wherever it is and whether it requires grad or not.

        Raises:
            ConfigurationError: the sampler has no priorities, or one is negative, not finite or so large that its power
                exceeds 1e100, or the rows were drawn from another buffer; nothing was changed.
        """
        check_instance("sampler", sampler, WeightedSampler, "the WeightedSampler that drew them")
        _check_drawn(drawn)
        return self._internals.update(sampler, drawn, priorities)

    def get(self, trajectory_id: int | str) -> AnyTrajectory:
        """Return a copy of a trajectory, by id. What is changed in it does not reach the store.

        Scores, corrections and tags of what is stored are given with :func:`trajstore.annotate`.

        Args:
            trajectory_id: as a number, or as it is shown: ``"3/17"`` of a run's rank 3.

        Raises:
            TrajectoryUnavailableError: there is none, or it has left memory.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        number = id_from("trajectory_id", trajectory_id)
        return self._view.locked(lambda contents: contents.get(contents.index.position_of(number)))

    # -- looking ----------------------------------------------------------------------------------

    def query(self, relation: str = "trajectories") -> Query:
        """Ask about the trajectories: ``query().where("task = 't3' and outcome > 0").ids()``.

        The index has the facts of rollouts; those of earlier layouts are read with the first question, and kept.
        Messages, tokens and steps are read from the trajectories of which the conditions on facts hold.
        Needs Polars (extra ``query``).

        Args:
            relation: what a row is: ``"trajectories"``; a message or token of a rollout (``"messages"``, ``"tokens"``);
                a step of an environment of a block (``"steps"``).

        Raises:
            ConfigurationError: there is no such relation.
        """
        return Query(
            self._facts.table,
            partial(scan, self._internals.rows, self._internals.late_rows),
            one_of("relation", relation, (TRAJECTORIES, *RELATIONS)),
        )

    @property
    def seed(self) -> int | None:
        """Seed of the generator; that of the checkpoint after ``load_checkpoint``."""
        return self._draws.seed

    def __len__(self) -> int:
        return len(self._view.contents.index)

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self._view.contents.index)

    @property
    def total_samples(self) -> int:
        """Number of samples, T·B summed over the trajectories."""
        with self._view.contents.lock:
            return self._view.contents.index.total_samples

    @property
    def trajectory_ids(self) -> npt.NDArray[np.int64]:
        """Ids of all trajectories, as an int64 array: in the order in which they were committed, the oldest first.

        Those of a run directory are by the time of their commits, whichever rank made them.
        """
        with self._view.contents.lock:
            return np.array(self._view.contents.index["trajectory_id"], np.int64)

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.size >= whole("min_size", min_size, 0)

    async def is_ready_async(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: trajectories, samples, cached trajectories and bytes, bytes waiting, mapped shards.

        ``cache_size`` and ``cache_bytes`` are of the cache in memory (``enable_cache``), not of the local copies of an
        object store; ``fetched_bytes`` are of rows fetched from there with ``range_reads``, in ``fetched_ranges``
        requests, for ``fetched_batches`` batches or trajectories (what was there already asks for nothing).
        Of the buffer's own store: ``live_bytes`` of its trajectories, ``shard_bytes`` of the files that these and its
        pins need, ``held_bytes`` of files that stay on disk only because a reader still shows what was evicted.
        """
        figures = self._backing.figures()
        contents = self._view.contents
        with contents.lock:
            fetched_bytes, fetched_ranges, fetched_batches = contents.addresses.fetched
            return {
                "num_trajectories": self.size,
                "total_samples": contents.index.total_samples,
                "cache_size": 0 if contents.cache is None else len(contents.cache),
                "cache_bytes": 0 if contents.cache is None else contents.cache.nbytes,
                "mapped_shards": contents.addresses.mapped,
                "fetched_bytes": fetched_bytes,
                "fetched_ranges": fetched_ranges,
                "fetched_batches": fetched_batches,
                **figures,
            }

    def clear_cache(self) -> None:
        """Drop what the cache holds; what is nowhere else stays."""
        self._view.contents.clear_cache()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to draw on as if nothing had happened."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the draws where :meth:`state_dict` left them.

        A state is that of the generator alone: it fits any buffer, and names no trajectories.

        Raises:
            ConfigurationError: it is no such state; nothing was changed.
        """
        self._draws.load_state_dict(state)


def _check_drawn(drawn: Drawn) -> None:
    check_instance("drawn", drawn, Drawn, "what draw() returned, or a batch's .drawn")
    for name, rows in (("ids", drawn.ids), ("samples", drawn.samples)):
        if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind != "i":
            raise ConfigurationError(
                f"drawn.{name}: {shown(rows)}, must be an array of whole numbers, one for each row"
            )
    if len(drawn.ids) != len(drawn.samples):
        raise ConfigurationError(f"drawn: {len(drawn.ids)} ids and {len(drawn.samples)} samples, must be as many")


def _check_out(out: Mapping[str, torch.Tensor] | None) -> None:
    check_kind("out", out, Mapping, "a dict of tensors by dotted name")
