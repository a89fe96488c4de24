"""The half of the buffer that reads: what is shown, and draws from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import INT64_MAX, check_instance, check_kind, columns_or_none, whole, whole_numbers
from trajstore.buffer.backing import Backing
from trajstore.buffer.choices import Choices
from trajstore.buffer.numbering import Numbering
from trajstore.buffer.retention import Retention
from trajstore.buffer.view import View
from trajstore.columns.fields import nest
from trajstore.columns.limits import shown
from trajstore.errors import ConfigurationError
from trajstore.reading.batch import Prepared
from trajstore.reading.contents import Contents
from trajstore.reading.tokens import TokenRows
from trajstore.sampling.base import Drawn, Sampler
from trajstore.sampling.draws import Draws, Window
from trajstore.sampling.weighted import WeightedSampler
from trajstore.trajectory import AnyTrajectory

_SAMPLER = "a sampler of trajstore.sampling (sampler_of makes one of a dict)"


class ReadableBuffer:
    """Trajectories that can be looked at and drawn from. Users make a ``TrajectoryReplayBuffer``.

    Args:
        view: what is shown.
        draws: the generator of the draws.
        backing: what stands behind the view.
        sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
    """

    def __init__(self, view: View, draws: Draws, backing: Backing, sample_window_size: int) -> None:
        self._view = view
        self._draws = draws
        self._backing = backing
        self._choices = Choices(view, draws)
        self._closed = False
        self.sample_window_size = sample_window_size

    @property
    def closed(self) -> bool:
        """Whether the buffer was closed: loaders give no more of its batches."""
        return self._closed

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
        _check_sampler(sampler)
        if sampler is not None:
            return self._choices.sample(num_chunks, self.sample_window_size, sampler, columns, out)

        def draw(contents: Contents) -> Prepared:
            window = Window.newest(contents.index, self.sample_window_size, contents.gap, contents.start)
            drawn = self._draws.samples(window, num_chunks)
            return contents.prepare(drawn, window.first, window.end, columns)

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
        _check_sampler(sampler)
        if sampler is not None:
            return self._choices.trajectories(count, self.sample_window_size, sampler)

        def draw(contents: Contents) -> list[AnyTrajectory]:
            window = Window.newest(contents.index, self.sample_window_size, contents.gap, contents.start)
            return [contents.get(position) for position in self._draws.trajectories(window, count)]

        return self._view.locked(draw)

    def draw(self, num_chunks: int, *, sampler: Sampler | None = None) -> Drawn:
        """Choose rows as :meth:`sample` does, without reading them; :meth:`read` reads them, also in another process.

        Raises:
            ConfigurationError: an argument is out of range; names it.
            EmptyBufferError: there is nothing to sample from.
        """
        _check_sampler(sampler)
        return self._choices.draw(whole("num_chunks", num_chunks, 1), self.sample_window_size, sampler)

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
        return self._choices.read(drawn, columns_or_none(columns), out)

    def numbering(self, trajectory_ids: npt.NDArray[np.int64]) -> Numbering:
        """Return the numbers of the first samples of trajectories, for whoever reads of the same ones many times."""
        return self._choices.numbering(trajectory_ids)

    def read_numbered(
        self,
        numbering: Numbering,
        numbers: npt.NDArray[np.int64],
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any] | None:
        """Return transitions as :meth:`read` does, told by number; None if trajectories have left since: number again.

        Args:
            numbering: from which ``numbers`` were counted.
            numbers: those of first samples plus places within the trajectories, ``[n]``.
            columns: as of :meth:`sample`.
            out: as of :meth:`sample`.

        Raises:
            SchemaMismatchError: their trajectories differ in their columns.
            TrajectoryUnavailableError: one of them was in memory only, and has left it.
        """
        return self._choices.numbered(numbering, numbers, columns, out)

    def readable(self, trajectory_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether each of these trajectories can be read: neither evicted nor unavailable."""
        return self._choices.readable(whole_numbers("trajectory_ids", trajectory_ids))

    def token_rows(self, trajectory_ids: npt.NDArray[np.int64], columns: Sequence[str] | None = None) -> TokenRows:
        """Return the token columns of agent trajectories, ready to be copied; what feeds batches of tokens is made of.

        Raises:
            TrajectoryUnavailableError: one of them has been evicted.
            SchemaMismatchError: one is no agent trajectory, or lacks a column.
        """
        return self._choices.tokens(whole_numbers("trajectory_ids", trajectory_ids), columns_or_none(columns))

    def follow(self, sampler: Sampler) -> None:
        """Tell a sampler of the trajectories that are here now, as the next draw would; before its state is loaded."""
        check_instance("sampler", sampler, Sampler, _SAMPLER)
        self._choices.follow(sampler)

    @property
    def generator(self) -> torch.Generator:
        """Generator of all draws; part of :meth:`state_dict`."""
        return self._draws.generator

    def extents(self, trajectory_ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return T and B of some trajectories, each ``[n]``.

        Raises:
            TrajectoryUnavailableError: one of them is not in the buffer.
        """
        return self._choices.extents(whole_numbers("trajectory_ids", trajectory_ids))

    def update_priorities(self, sampler: WeightedSampler, drawn: Drawn, priorities: npt.ArrayLike) -> int:
        """Give rows that a sampler drew new priorities, and return how many of them have been evicted since.

        Args:
            sampler: the one that drew them.
            drawn: of the batch (``batch.drawn``).
            priorities: one for each row, at least 0: usually the absolute TD error. Of a tensor the values count,
                wherever it is and whether it requires grad or not.

        Raises:
            ConfigurationError: the sampler has no priorities, or one is negative or not finite; nothing was changed.
        """
        check_instance("sampler", sampler, WeightedSampler, "the WeightedSampler that drew them")
        _check_drawn(drawn)
        return self._choices.update(sampler, drawn, priorities)

    def get(self, trajectory_id: int) -> AnyTrajectory:
        """Return a trajectory by id, its tensors copied.

        Raises:
            TrajectoryUnavailableError: there is none, or it has left memory.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        number = whole("trajectory_id", trajectory_id, -INT64_MAX)
        return self._view.locked(lambda contents: contents.get(contents.index.position_of(number)))

    # -- looking ----------------------------------------------------------------------------------

    @property
    def seed(self) -> int | None:
        """Seed of the generator; that of the checkpoint after ``load_checkpoint``."""
        return self._draws.seed

    @property
    def retention(self) -> Retention:
        """Limits, beyond which the oldest trajectories go."""
        return self._view.retention

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
        """Ids of all trajectories, oldest first, as an int64 array."""
        with self._view.contents.lock:
            return np.array(self._view.contents.index["trajectory_id"], np.int64)

    @property
    def trajectory_uuids(self) -> npt.NDArray[np.void]:
        """UUIDs of all trajectories, oldest first, as an array of 16 bytes each."""
        with self._view.contents.lock:
            return np.array(self._view.contents.index["uuid"])

    def names_of(self, trajectory_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first half of the UUID of some trajectories, by which states tell them from others of their ids.

        0 stands for those that are not shown, and for all where UUIDs are made anew in each process: in memory only,
        and of RLinf's directories.
        """
        return self._choices.names(whole_numbers("trajectory_ids", trajectory_ids))

    @property
    def store_ids(self) -> list[str]:
        """UUIDs of the stores that are shown: the buffer's own, and those that were loaded."""
        return self._view.store_ids

    @property
    def share(self) -> tuple[int, int] | None:
        """(local_rank, world_size), if the buffer shows one rank's share of what was loaded; else None."""
        request = self._view.request
        return None if request is None else request.share

    @property
    def store_id(self) -> str | None:
        """UUID of the directory that this buffer writes to; None in memory only."""
        return self._backing.store_id

    @property
    def trajectory_counter(self) -> int:
        """One more than the newest id."""
        return self._backing.intake.counter

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.size >= whole("min_size", min_size, 0)

    async def is_ready_async(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: trajectories, samples, cached trajectories and bytes, bytes waiting, mapped shards.

        ``cache_size`` and ``cache_bytes`` are of the cache in memory (``enable_cache``), not of the local copies of an
        object store; ``fetched_bytes`` and ``fetched_ranges`` are rows fetched from there, with ``range_reads``.
        Of the buffer's own store: ``live_bytes`` of its trajectories, ``shard_bytes`` of the files that these and its
        pins need, ``held_bytes`` of files that stay on disk only because a reader still shows what was evicted.
        """
        figures = self._backing.figures()
        contents = self._view.contents
        with contents.lock:
            fetched_bytes, fetched_ranges = contents.residency.fetched
            return {
                "num_trajectories": self.size,
                "total_samples": contents.index.total_samples,
                "cache_size": 0 if contents.cache is None else len(contents.cache),
                "cache_bytes": 0 if contents.cache is None else contents.cache.nbytes,
                "mapped_shards": contents.residency.mapped,
                "fetched_bytes": fetched_bytes,
                "fetched_ranges": fetched_ranges,
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


def _check_sampler(sampler: Sampler | None) -> None:
    check_kind("sampler", sampler, Sampler, _SAMPLER)


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
