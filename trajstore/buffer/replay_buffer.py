"""The replay buffer: a facade over intake, writer, view, draws and checkpoints."""

from __future__ import annotations

import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import check_kind, truth, whole, whole_or_none
from trajstore.buffer.checkpoint import CheckpointState, Layout, save_checkpoint
from trajstore.buffer.choices import Choices
from trajstore.buffer.column_watch import ColumnWatch
from trajstore.buffer.intake import Intake, MemoryIntake, StoreIntake
from trajstore.buffer.listener import ViewListener, WeakListener, close_quietly
from trajstore.buffer.loading import Loaded
from trajstore.buffer.retention import Retention
from trajstore.buffer.rlinf_guard import check_not_rlinf
from trajstore.buffer.view import LoadRequest, View
from trajstore.columns.fields import nest
from trajstore.columns.record import NothingToStoreError, record_of
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreError, listed
from trajstore.exits import forget, remember
from trajstore.files.opening import open_directory
from trajstore.formats import get_format
from trajstore.reading.contents import Contents, Cut, Prepared
from trajstore.reading.places import check_no_ranks
from trajstore.sampling.base import Drawn, Sampler
from trajstore.sampling.draws import Draws, Window
from trajstore.sampling.weighted import WeightedSampler
from trajstore.trajectory import AnyTrajectory
from trajstore.writing.interrupts import uninterrupted
from trajstore.writing.options import WriterOptions
from trajstore.writing.writer import StoreWriter

logger = logging.getLogger(__name__)


class TrajectoryReplayBuffer:
    """A replay buffer of trajectories ``[T, B, ...]`` (or agent trajectories) on disk, or in memory only.

    With ``auto_save=True`` every trajectory is written to ``auto_save_path`` in the background; what was
    flushed survives a crash, and a buffer made on a directory that holds a store continues it. With
    ``auto_save=False`` the newest ``sample_window_size`` trajectories are kept in memory; older ones are
    counted, as RLinf does, but never drawn. The first seven arguments, their defaults, and the samples drawn
    for a seed are those of RLinf's buffer.

    Args:
        seed: seed of the generator that draws samples; None draws one from the system.
        enable_cache: keep trajectories in memory after they were written. Only of use for formats that
            cannot be mapped, or when the files lie on a slow disk.
        cache_size: number of trajectories that the cache keeps (``auto_save=True``).
        sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
        auto_save: write trajectories to ``auto_save_path``.
        auto_save_path: directory or fsspec URL (``s3://bucket/run``); without ``auto_save`` a warning says that nothing
            is written there.
        trajectory_format: ``"pt"``, ``"pkl"`` or ``"zarr"``.
        cache_bytes: bytes that the cache keeps (``auto_save=False``: that stay in memory); None = no bound.
        retention: limits; the oldest trajectories beyond them are deleted.
        writer: threads and memory of the writer.
        format_options: options of the format (zarr: codec, chunking).
        storage_options: passed on to the fsspec file system.
        on_commit: called with the ids of each commit, in order, by a thread of its own that holds no lock, so that it
            may call the buffer back. ``flush`` does not wait for it, ``close`` does. What it raises is logged.
        verify_shards: compare the checksums of a shard, whole, when it is read for the first time, so that changed
            bytes raise CorruptStoreError instead of being drawn. Costs one pass over each shard.

    Raises:
        ConfigurationError: an argument is out of range, or ``auto_save_path`` has stores in ``rank_*`` folders, or is
            a directory of RLinf.
        StoreLockedError: another process writes to ``auto_save_path``.
        StoreWriteError: ``auto_save_path`` cannot be written.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: what lies there cannot be continued.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | Path = "",
        trajectory_format: str = "pt",
        *,
        cache_bytes: int | None = None,
        retention: Retention | None = None,
        writer: WriterOptions | None = None,
        format_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        on_commit: Callable[[Sequence[int]], None] | None = None,
        verify_shards: bool = False,
    ) -> None:
        self._check_kinds(auto_save_path, retention, writer, format_options, storage_options, on_commit)
        auto_save, enable_cache = truth("auto_save", auto_save), truth("enable_cache", enable_cache)
        cache_size, cache_bytes = whole("cache_size", cache_size, 0), whole_or_none("cache_bytes", cache_bytes, 0)
        seed = whole_or_none("seed", seed, -(1 << 63), (1 << 64) - 1)
        path = str(auto_save_path or "")
        if auto_save and not path:
            raise ConfigurationError("auto_save_path: must be given when auto_save is true")
        if path and not auto_save:
            told = f"auto_save_path={path!r} has no effect without auto_save=True: nothing is written there"
            warnings.warn(told, stacklevel=2)
        self.sample_window_size = sample_window_size
        self.auto_save = auto_save
        self.auto_save_path = path if auto_save else None
        self.trajectory_format = trajectory_format
        self._format = get_format(trajectory_format, **(format_options or {}))
        self._storage_options = dict(storage_options or {})
        self._draws = Draws(seed)
        bounds: tuple[int | None, int | None] | None = (cache_size, cache_bytes) if enable_cache else None
        if not auto_save:
            bounds = self.sample_window_size or None, cache_bytes
        self._view = View(bounds, retention or Retention(), truth("verify_shards", verify_shards))
        self._watch = ColumnWatch()
        self._choices = Choices(self._view, self._draws)
        self._writer: StoreWriter | None = None
        self._intake = self._open(writer or WriterOptions(), on_commit) if auto_save else MemoryIntake(self._view)

    @staticmethod
    def _check_kinds(
        auto_save_path: Any,
        retention: Any,
        writer: Any,
        format_options: Any,
        storage_options: Any,
        on_commit: Any,
    ) -> None:
        check_kind("auto_save_path", auto_save_path, str | Path, "a path or URL")
        hint = f"; write Retention(max_trajectories={retention})" if isinstance(retention, int) else ""
        check_kind("retention", retention, Retention, f"a Retention{hint}")
        check_kind("writer", writer, WriterOptions, "WriterOptions")
        check_kind("format_options", format_options, Mapping, "a dict")
        check_kind("storage_options", storage_options, Mapping, "a dict")
        check_kind("on_commit", on_commit, Callable, "a function of the ids")

    @property
    def sample_window_size(self) -> int:
        """Samples are drawn from this many newest trajectories; 0 = from all."""
        return self._sample_window_size

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        self._sample_window_size = whole("sample_window_size", value, 0)

    def _open(self, options: WriterOptions, on_commit: Callable[[Sequence[int]], None] | None) -> Intake:
        directory = open_directory(str(self.auto_save_path), **self._storage_options)
        check_no_ranks(directory)
        check_not_rlinf(directory)  # before anything is written there, the lock included
        self._listener = ViewListener(self._view, self._draws, on_commit)
        told = WeakListener(self._listener)
        self._writer = StoreWriter(
            directory, self._format, options, told, None if on_commit is None else told.on_commit
        )
        # Whenever an interrupt comes, the lock is given back: with the writer, or by whoever closes it.
        self._finalizer = weakref.finalize(self, close_quietly, self._writer)
        self._finalizer.atexit = False  # too late for zarr; see trajstore.exits
        remember(self._writer)
        self._writer.start()
        catalog = self._writer.log.catalog
        self._view.show_own(catalog)
        if len(catalog.index):
            self._watch.begin(catalog.shards.schema(int(catalog.index["shard"][-1])))
        self._listener.opened(catalog.next_id - 1)
        self._retain()
        return StoreIntake(self._view, self._writer.queue, options, catalog.next_id)

    def _retain(self) -> None:
        """Let go of what lies beyond the limits, before the next addition; of what was loaded, only here."""
        if self.retention == Retention():
            return
        before = len(self)
        if self._writer is not None:
            self._writer.retain()
        elif before:
            self._view.forget(self._view.expire(int(self.trajectory_ids.max())))
        if len(self) < before:
            logger.info("retention: %d of %d trajectories are shown no longer", before - len(self), before)

    # -- adding -----------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[AnyTrajectory]) -> list[int]:
        """Add trajectories and return their ids. All are checked before any is added.

        One with nothing in it (no fields, or no samples) is passed over with a warning, and has no id.

        The tensors are copied before this returns; writing goes on in the background. With the memory for
        waiting writes full, this waits or raises, as ``WriterOptions.on_full`` says.

        Raises:
            InvalidTrajectoryError: fields do not fit together, or one has a value that cannot be stored and read
                back; names the field, and its shapes or value. Nothing was added.
            StoreWriteError: an earlier write failed; nothing was added. Each failure is told once; what could not be
                written is kept in memory and tried again.
            UnwritableTrajectoryError: earlier trajectories could not be written for their own sake; nothing was added.
            PendingFullError: no room for more waiting writes (``on_full="raise"``).
        """
        if not isinstance(trajectories, Iterable) or isinstance(trajectories, str | bytes | Mapping | torch.Tensor):
            raise InvalidTrajectoryError(
                f"add_trajectories takes a list of trajectories, not a {type(trajectories).__name__}: "
                "write add_trajectories([trajectory])"
            )
        records = []
        empty = []
        for place, trajectory in enumerate(trajectories):
            try:
                records.append(record_of(trajectory))
            except NothingToStoreError:
                empty.append(place)
        if empty:
            logger.warning(
                "add_trajectories: at the places %s of %d there is nothing to store (no fields, or T * B = 0); "
                "the others have ids",
                listed(str(place) for place in empty),
                len(empty) + len(records),
            )
        self._watch.look(records)
        return self._intake.add(records) if records else []

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything added before survives SIGKILL and power loss. Nothing to do in memory only.

        Raises:
            StoreWriteError: a write failed; names the file. What was not written is kept; call again.
            UnwritableTrajectoryError: trajectories could not be written for their own sake; all others are on disk.
            TimeoutError: ``timeout`` seconds passed.
        """
        if self._writer is not None:
            self._writer.flush(timeout)

    def wait(self, ids: Sequence[int], timeout: float | None = None) -> bool:
        """Wait until trajectories are committed; return whether all are (False after ``timeout`` seconds).

        Raises:
            StoreWriteError: they cannot be written at present.
        """
        if self._writer is None or not ids:
            return False
        return self._writer.queue.wait(max(ids), timeout)

    @property
    def committed(self) -> int:
        """Watermark: every trajectory of this buffer's store up to this id survives a crash; -1 before the first."""
        return -1 if self._writer is None else self._writer.queue.committed

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories, durably. Files go when no pin and no reader needs them.

        Raises:
            TrajectoryUnavailableError: an id is not in the buffer; nothing was deleted.
            StoreWriteError: the log could not be written; nothing was deleted. Or trajectories that wait to be written
                could not be; all others were deleted.
        """
        if not len(ids):
            return
        with self._view.contents.lock:
            for number in ids:
                self._view.contents.index.position_of(number)
        mine = [number for number in ids if self._writer is not None and number >= self._view.own_first]
        if self._writer is not None and mine:
            contents = self._view.contents
            waiting = {number for number in mine if contents.is_pending(number)}
            # First what needs no space: on a full disk, writing what waits is only possible afterwards.
            if len(waiting) < len(mine):
                uninterrupted(partial(self._writer.log.evict, [number for number in mine if number not in waiting]))
            if waiting:
                self._writer.flush()
                uninterrupted(partial(self._writer.log.evict, list(waiting)))
            self._writer.rewriter.note()
        self._view.forget([number for number in ids if self._writer is None or number < self._view.own_first])

    def clear(self) -> None:
        """Delete all trajectories. Ids go on; they are never given twice."""
        self.evict(self.trajectory_ids.tolist())

    def compact(self) -> None:
        """Give back the disk space that evicted trajectories have in shards of live ones, and unite small shards.

        The writer does this by itself, in the background, for shards of which half or more is dead, as soon as more is
        dead than live. This goes on until no shard has a dead row and no two small ones are left. It copies what it
        keeps; others may add and sample meanwhile. Nothing to do in memory only.

        Raises:
            StoreWriteError: it could not be written; the store is as it was.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        if self._writer is not None:
            self._writer.compact()

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
            num_chunks: number of transitions; more than the window has is cut to what it has.
            columns: dotted names of the columns wanted; None = all.
            out: tensors to fill, by dotted name; ``[>= num_chunks, ...]``, of the column's dtype.
            sampler: chooses the transitions; the same object each time, as it is told of what was added and evicted.

        Returns:
            A nested dict of tensors ``[num_chunks, ...]`` with keys and dtypes as they were added. With a sampler it
            is a :class:`~trajstore.buffer.choices.Batch`, which also says which rows it holds and how much each counts.

        Raises:
            EmptyBufferError: there is nothing to sample from.
            SchemaMismatchError: trajectories of the window differ in their columns, or are agent trajectories, which
                :meth:`sample_trajectories` draws whole.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        if num_chunks <= 0:
            raise ConfigurationError(f"num_chunks: {num_chunks}, must be positive")
        if sampler is not None:
            return self._choices.sample(num_chunks, self.sample_window_size, sampler, columns, out)

        def draw(contents: Contents) -> tuple[Contents, Prepared]:
            window = Window.newest(contents.index, self.sample_window_size, contents.gone, contents.start)
            drawn = self._draws.samples(window, num_chunks)
            return contents, contents.prepare(drawn, window.first, window.end, columns)

        contents, prepared = self._view.locked(draw)
        return nest(contents.read(prepared, out))

    def sample_trajectories(self, count: int, *, sampler: Sampler | None = None) -> list[AnyTrajectory]:
        """Draw whole trajectories uniformly, without repetition, from the window; all if ``count`` is larger.

        Args:
            count: how many.
            sampler: chooses instead; one that draws whole trajectories.

        Raises:
            EmptyBufferError: there is nothing to sample from.
            ConfigurationError: the sampler draws transitions.
        """
        if sampler is not None:
            return self._choices.trajectories(count, self.sample_window_size, sampler)

        def draw(contents: Contents) -> list[AnyTrajectory]:
            window = Window.newest(contents.index, self.sample_window_size, contents.gone, contents.start)
            return [contents.get(position) for position in self._draws.trajectories(window, count)]

        return self._view.locked(draw)

    def draw(self, num_chunks: int, *, sampler: Sampler | None = None) -> Drawn:
        """Choose rows as :meth:`sample` does, without reading them; :meth:`read` reads them, also in another process.

        Raises:
            EmptyBufferError: there is nothing to sample from.
        """
        if num_chunks <= 0:
            raise ConfigurationError(f"num_chunks: {num_chunks}, must be positive")
        return self._choices.draw(num_chunks, self.sample_window_size, sampler)

    def read(
        self, drawn: Drawn, *, columns: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return transitions that :meth:`draw` chose, as :meth:`sample` returns them.

        Raises:
            TrajectoryUnavailableError: one of their trajectories has been evicted since.
            SchemaMismatchError: their trajectories differ in their columns.
        """
        return self._choices.read(drawn, columns, out)

    def follow(self, sampler: Sampler) -> None:
        """Tell a sampler of the trajectories that are here now, as the next draw would; before its state is loaded."""
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
        return self._choices.extents(trajectory_ids)

    def update_priorities(self, sampler: WeightedSampler, drawn: Drawn, priorities: npt.ArrayLike) -> int:
        """Give rows that a sampler drew new priorities, and return how many of them have been evicted since.

        Args:
            sampler: the one that drew them.
            drawn: of the batch (``batch.drawn``).
            priorities: one for each row, at least 0: usually the absolute TD error.

        Raises:
            ConfigurationError: the sampler has no priorities, or one is negative or not finite; nothing was changed.
        """
        return self._choices.update(sampler, drawn, priorities)

    def get(self, trajectory_id: int) -> AnyTrajectory:
        """Return a trajectory by id, its tensors copied.

        Raises:
            TrajectoryUnavailableError: there is none, or it has left memory.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        return self._view.locked(lambda contents: contents.get(contents.index.position_of(trajectory_id)))

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
    def store_id(self) -> str | None:
        """UUID of the directory that this buffer writes to; None in memory only."""
        return None if self._writer is None else self._writer.log.catalog.store_id

    @property
    def trajectory_counter(self) -> int:
        """One more than the newest id."""
        return self._intake.counter

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.size >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: trajectories, samples, cached trajectories and bytes, bytes waiting, mapped shards.

        Of the buffer's own store: ``live_bytes`` of its trajectories, ``shard_bytes`` of the files that these and its
        pins need, ``held_bytes`` of files that stay on disk only because a reader still shows what was evicted.
        """
        live, files = (0, 0) if self._writer is None else self._writer.log.space()
        contents = self._view.contents
        with contents.lock:
            return {
                "num_trajectories": self.size,
                "total_samples": contents.index.total_samples,
                "cache_size": 0 if contents.cache is None else len(contents.cache),
                "cache_bytes": 0 if contents.cache is None else contents.cache.nbytes,
                "pending_bytes": 0 if self._writer is None else self._writer.queue.pending_bytes,
                "mapped_shards": contents.residency.mapped,
                "write_retries": 0 if self._writer is None else self._writer.queue.retries,
                "set_aside": 0 if self._writer is None else self._writer.queue.set_aside,
                "live_bytes": live,
                "shard_bytes": files,
                "held_bytes": 0 if self._writer is None else self._writer.log.garbage.held_bytes,
            }

    def clear_cache(self) -> None:
        """Drop what the cache holds; what is nowhere else stays."""
        self._view.contents.clear_cache()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to draw on as if nothing had happened."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the draws where :meth:`state_dict` left them."""
        self._draws.load_state_dict(state)

    def save_checkpoint(self, save_path: str | Path, *, layout: Layout = "trajstore") -> None:
        """Save everything that is in the buffer now to a directory of its own; adding may go on meanwhile.

        Files are hard-linked where the file system can, else copied; the directory appears whole or not at
        all. With ``auto_save=False``, trajectories that have left memory are not saved.

        Args:
            save_path: directory or URL; absent, empty, or an earlier checkpoint, which is replaced.
            layout: ``"trajstore"``, or ``"rlinf"`` for a directory that RLinf reads.

        Raises:
            StoreWriteError: it could not be written; an earlier checkpoint is still there.
        """
        self.flush()
        with self._view.steady, nullcontext() if self._writer is None else self._writer.log.keeping_files():
            self._save_checkpoint(save_path, layout)

    def _save_checkpoint(self, save_path: str | Path, layout: Layout) -> None:
        def picture(contents: Contents) -> tuple[CheckpointState, Cut]:
            state = CheckpointState(
                trajectory_format=self.trajectory_format,
                trajectory_counter=self._intake.counter,
                seed=self.seed,
                rng_state=self._draws.rng_state,
            )
            return state, contents.cut()

        state, cut = self._view.locked(picture)
        save_checkpoint(open_directory(save_path, **self._storage_options), cut, state, self._format, layout)

    def pin(self, name: str) -> int:
        """Make a checkpoint inside the store: keep its present state readable under a name; return its generation.

        ``load_checkpoint(path, pin=name)`` reads it, however much is added and evicted later.

        Raises:
            StoreError: the buffer has no store (``auto_save=False``).
        """
        if self._writer is None:
            raise StoreError("pin: this buffer has no store of its own; use auto_save=True or save_checkpoint")
        self.flush()
        state = CheckpointState.rng_json(self.seed, self._draws.rng_state)
        return uninterrupted(partial(self._writer.log.pin, name, **state))

    def unpin(self, name: str) -> None:
        """Let go of a pin; evicted trajectories that only it named are deleted."""
        if self._writer is not None:
            uninterrupted(partial(self._writer.log.unpin, name))
            self._writer.rewriter.note()

    def load_checkpoint(
        self,
        load_path: str | Path,
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        strict: bool | None = None,
        pin: str | None = None,
    ) -> int:
        """Replace the contents by those of a directory, which is read in place and never written to.

        A store, a checkpoint, a directory of RLinf, or a folder of ``rank_*`` directories, which are united.
        The generator takes up where the checkpoint left it. Later additions go to this buffer's own path.

        Args:
            load_path: directory or URL.
            is_distributed: load only the contiguous share of ``local_rank`` among ``world_size`` ranks.
            local_rank: 0-based.
            world_size: number of shares.
            strict: refuse a directory of which anything is damaged or absent (True; what lies in shards is not read:
                sizes are compared), or leave out what cannot be read, work out what can be, and log a warning on each
                (False). By default a directory of RLinf is loaded as RLinf loads it: its usual checkpoints in memory
                only list more trajectories than they hold, which is told in a warning; any other directory is refused.
                Of RLinf's directories, files absent before the oldest one that is there are counted by
                ``len`` and ``is_ready``, as RLinf counts them, and never drawn.
            pin: name of a checkpoint inside the store.

        Returns:
            The number of trajectories whose files are absent, or which were left out because they are damaged.

        Raises:
            StoreNotFoundError: there is nothing that can be loaded.
            IncompleteCheckpointError: files or ranks are absent, or files cut (``strict``); lists them.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; names
                all ranks that cannot be.
            StoreError: a store lies beside ``rank_*`` stores (``strict``).
        """
        self.flush()
        share = (local_rank, world_size) if is_distributed else None
        directory = open_directory(load_path, **self._storage_options)
        with self._view.steady:
            loaded = self._load(LoadRequest(directory, share, strict, pin))
        self._view.tell_hidden()
        self._retain()
        state = loaded.state
        if self._writer is None and state.trajectory_format != self.trajectory_format:
            self._format = get_format(state.trajectory_format)
            self.trajectory_format = state.trajectory_format
        self._draws.take_up(state.seed, state.rng_state)
        return loaded.skipped

    def refresh(self) -> bool:
        """See what a live writer has committed to the loaded directory since; return whether anything changed.

        Of one store that is shown whole this takes the time of what is new; what was mapped and cached stays. A
        share, a pin, the ranks of a run, and a store whose log has been written into its index since, are loaded again.

        Raises:
            StoreNotFoundError: what was loaded is there no longer.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; nothing changed.
        """
        with self._view.steady:
            before = self._view.generations
            request = self._view.request_if_changed()
            if request is None:
                return False
            with self._intake.lock:
                next_id = self._view.follow()
                if next_id is not None:
                    self._intake.go_on(next_id, request.first_id(next_id), request.stride)
            if next_id is None:
                self._tell_of_added()
                self._load(request)
            changed = self._view.generations != before
        self._retain()
        return changed

    def _tell_of_added(self) -> None:
        """Warn that what was added since the load is about to be shown no longer."""
        added = self._view.contents.added
        if added:
            where = "they were in memory only and are lost" if self._writer is None else "they stay in its own store"
            logger.warning(
                "refresh: loads again, and no longer shows the %d trajectories that were added here since; %s",
                added,
                where,
            )

    def _load(self, request: LoadRequest) -> Loaded:
        contents, loaded = self._view.open(request)
        with self._intake.lock:
            self._view.replace(request, contents, loaded)
            self._intake.go_on(loaded.counter, request.first_id(loaded.next_id), request.stride)
        return loaded

    # -- the end ----------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        """Flush and give the directory back. Closing again does nothing.

        Args:
            wait: kept for callers of RLinf's buffer; what was added is always written first.

        Raises:
            StoreWriteError: something did not reach the disk; the buffer is closed all the same.
        """
        self._view.release()
        if self._writer is not None:
            try:
                self._writer.close()
            finally:
                if self._writer.closed:  # else interrupted: it is closed in the background, or at exit
                    self._finalizer.detach()
                    forget(self._writer)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Send a buffer that only reads to another process, which opens what this one loaded, by its path.

        Raises:
            StoreError: the buffer writes, or holds trajectories that are nowhere else; says what to do instead.
        """
        if self._writer is not None:
            raise StoreError(
                f"{self.auto_save_path}: a buffer that writes stays in its process, as a store has one writer; in the "
                f"other process make a buffer, load_checkpoint({self.auto_save_path!r}), and refresh() to follow"
            )
        if self._view.locked(lambda contents: bool(contents.cut().records)):
            raise StoreError(
                "this buffer has trajectories that are in the memory of this process only; call save_checkpoint, and "
                "load_checkpoint in the other process"
            )
        options = {
            "sample_window_size": self.sample_window_size,
            "trajectory_format": self.trajectory_format,
            "cache_bytes": self._view.cache_bytes,
            "retention": self.retention,
            "storage_options": self._storage_options,
            "verify_shards": self._view.verify_shards,
        }
        request = self._view.request
        loaded = None if request is None else (request.directory.url, request.share, request.strict, request.pin)
        # As bytes: torch would send a tensor as an open file, of which there are few.
        return _reopened, (options, loaded, pickle.dumps(self.state_dict()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reopened(
    options: Mapping[str, Any],
    loaded: tuple[str, tuple[int, int] | None, bool | None, str | None] | None,
    state: bytes,
) -> TrajectoryReplayBuffer:
    """Return a buffer that reads what another process had loaded."""
    buffer = TrajectoryReplayBuffer(seed=None, **options)
    if loaded is not None:
        path, share, strict, pin = loaded
        rank, ranks = share or (0, 1)
        buffer.load_checkpoint(path, share is not None, rank, ranks, strict=strict, pin=pin)
    buffer.load_state_dict(pickle.loads(state))
    return buffer
