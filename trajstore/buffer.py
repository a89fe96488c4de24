"""The replay buffer: a facade over contents, writer, checkpoints and the random generator."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trajstore.cache import TrajectoryCache
from trajstore.checkpoint import CheckpointState, Layout, load_sources, save_checkpoint
from trajstore.contents import Contents
from trajstore.errors import ConfigurationError, EmptyBufferError, StoreError
from trajstore.fields import nest
from trajstore.formats import get_format
from trajstore.pending import block_nbytes, own
from trajstore.record import Record, record_of
from trajstore.retention import Retention
from trajstore.sources import StoreSource
from trajstore.storage import ReaderPin, open_directory
from trajstore.trajectory import AnyTrajectory
from trajstore.writer import Commit, StoreWriter, WriterOptions, random_uuids

logger = logging.getLogger(__name__)

_MAP_LIMIT = 16384


class TrajectoryReplayBuffer:
    """A replay buffer of trajectories ``[T, B, ...]`` (or agent trajectories) on disk, or in memory only.

    With ``auto_save=True`` every trajectory is written to ``auto_save_path`` in the background; what was
    flushed survives a crash, and a buffer made on a directory that holds a store continues it. With
    ``auto_save=False`` the newest ``sample_window_size`` trajectories are kept in memory. The first seven
    arguments, their defaults, and the samples drawn for a seed are those of RLinf's buffer.

    Args:
        seed: seed of the generator that draws samples; None draws one from the system.
        enable_cache: keep trajectories in memory after they were written. Only of use for formats that
            cannot be mapped, or when the files lie on a slow disk.
        cache_size: number of trajectories that the cache keeps (``auto_save=True``).
        sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
        auto_save: write trajectories to ``auto_save_path``.
        auto_save_path: directory or fsspec URL (``s3://bucket/run``).
        trajectory_format: ``"pt"``, ``"pkl"`` or ``"zarr"``.
        cache_bytes: bytes that the cache keeps; None = no bound but ``cache_size``.
        retention: limits; the oldest trajectories beyond them are deleted from disk.
        writer: threads and memory of the writer.
        format_options: options of the format (zarr: codec, chunking).
        storage_options: passed on to the fsspec file system.
        on_commit: called with the ids of each commit, from a writer thread; must be quick.

    Raises:
        ConfigurationError: an argument is out of range.
        StoreLockedError: another process writes to ``auto_save_path``.
        StoreWriteError: ``auto_save_path`` cannot be written.
        CorruptStoreError, UnsupportedVersionError: what lies there cannot be continued.
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
    ) -> None:
        if auto_save and not str(auto_save_path):
            raise ConfigurationError("auto_save_path: must be given when auto_save is true")
        self.seed = seed
        self.sample_window_size = sample_window_size
        self.auto_save = auto_save
        self.auto_save_path = str(auto_save_path) if auto_save else None
        self.trajectory_format = trajectory_format
        self.retention = retention or Retention()
        self._format = get_format(trajectory_format, **(format_options or {}))
        self._storage_options = dict(storage_options or {})
        self._on_commit = on_commit
        self._generator = self._seeded(seed)
        self._cache_options = self._cache_bounds(enable_cache, cache_size, cache_bytes)
        self._contents = self._new_contents()
        self._pins: list[ReaderPin] = []
        self._loaded: _Loaded | None = None
        self._counter = 0
        self._next_memory_id = 0
        self._memory_stride = 1
        self._clamp_told = False
        self._adding = threading.Lock()
        self._writer: StoreWriter | None = None
        self._own_source = -1
        self._own_first = 0  # ids from here on are this buffer's own; lower ones were loaded
        if auto_save:
            self._open_writer(writer or WriterOptions())

    def _open_writer(self, options: WriterOptions) -> None:
        directory = open_directory(str(self.auto_save_path), **self._storage_options)
        listener = _Listener(self)
        self._writer = StoreWriter(directory, self._format, options, listener.metadata, listener)
        self._finalizer = weakref.finalize(self, _close_quietly, self._writer)
        catalog = self._writer.catalog
        source = StoreSource(catalog)
        with self._contents.lock:
            self._own_source = self._contents.attach(source)
            self._contents.show(self._own_source, catalog.index.slice(0, len(catalog.index)))
        self._counter = catalog.next_id

    def _cache_bounds(self, enable: bool, size: int, nbytes: int | None) -> tuple[int | None, int | None] | None:
        if not self.auto_save:
            return (self.sample_window_size if self.sample_window_size > 0 else None), nbytes
        return (size, nbytes) if enable else None

    def _new_contents(self) -> Contents:
        cache = None if self._cache_options is None else TrajectoryCache(*self._cache_options)
        return Contents(cache, _MAP_LIMIT)

    @staticmethod
    def _seeded(seed: int | None) -> torch.Generator:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return generator

    # -- adding -----------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[AnyTrajectory]) -> list[int]:
        """Add trajectories and return their ids. All are checked before any is added.

        The tensors are copied before this returns; writing goes on in the background. With the memory for
        waiting writes full, this waits or raises, as ``WriterOptions.on_full`` says.

        Raises:
            InvalidTrajectoryError: fields do not fit together; names field and shapes.
            StoreWriteError: an earlier write failed; nothing was added. ``flush`` tries it again.
            PendingFullError: no room for more waiting writes (``on_full="raise"``).
        """
        records = [record_of(trajectory) for trajectory in trajectories]
        if not records:
            return []
        if self._writer is None:
            owned = [own(record) for record in records]
            with self._adding:
                ids = [self._next_memory_id + i * self._memory_stride for i in range(len(owned))]
                self._next_memory_id = ids[-1] + self._memory_stride
                self._counter = ids[-1] + 1
                self._contents.add(owned, ids, random_uuids(len(owned)), pending=False)
            return ids
        ids = []
        for group in _groups(records, self._writer.options.shard_bytes):
            ids += self._submit(self._writer, group)
        return ids

    def _submit(self, writer: StoreWriter, records: Sequence[Record]) -> list[int]:
        nbytes = sum(block_nbytes(record) for record in records)
        writer.reserve(nbytes)
        try:
            owned = [own(record) for record in records]
        except BaseException:
            writer.unreserve(nbytes)
            raise
        with self._adding:
            ids, uuids = writer.take_ids(len(owned))
            self._contents.add(owned, ids, uuids, pending=True)
            writer.submit(owned, ids, uuids)
            self._counter = ids[-1] + 1
        return ids

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything added before survives SIGKILL and power loss. Nothing to do in memory only.

        Raises:
            StoreWriteError: a write failed; names the file. What was not written is kept; call again.
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
        return self._writer.wait(max(ids), timeout)

    @property
    def committed(self) -> int:
        """Watermark: every trajectory of this buffer's store up to this id survives a crash; -1 before the first."""
        return -1 if self._writer is None else self._writer.committed

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories, durably. Files go when no pin and no reader needs them.

        Raises:
            TrajectoryUnavailableError: an id is not in the buffer; nothing was deleted.
            StoreWriteError: the log could not be written; nothing was deleted.
        """
        if not len(ids):
            return
        with self._contents.lock:
            for number in ids:
                self._contents.index.position_of(number)
        mine = [number for number in ids if self._writer is not None and number >= self._own_first]
        if self._writer is not None and mine:
            self.flush()
            self._writer.evict(mine)
        self._forget([number for number in ids if self._writer is None or number < self._own_first])

    def _forget(self, ids: Sequence[int]) -> None:
        with self._contents.lock:
            found = [self._contents.index.find(number) for number in ids]
            self._contents.drop(np.array([position for position in found if position is not None], np.intp))

    def clear(self) -> None:
        """Delete all trajectories. Ids go on; they are never given twice."""
        self.evict(self.trajectory_ids.tolist())

    # -- sampling ---------------------------------------------------------------------------------

    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """Draw transitions uniformly, with replacement, from the window of the newest trajectories.

        Args:
            num_chunks: number of transitions; more than the window has is cut to what it has.
            columns: dotted names of the columns wanted; None = all.
            out: tensors to fill, by dotted name; ``[>= num_chunks, ...]``, of the column's dtype.

        Returns:
            A nested dict of tensors ``[num_chunks, ...]`` with keys and dtypes as they were added.

        Raises:
            EmptyBufferError: there is nothing to sample from.
            SchemaMismatchError: trajectories of the window differ in their columns.
            CorruptStoreError: a file is missing or damaged.
        """
        if num_chunks <= 0:
            raise ConfigurationError(f"num_chunks: {num_chunks}, must be positive")
        with self._current() as contents:
            index = contents.index
            first = index.end - self._window_length(len(index))
            total = index.samples_before(index.end) - index.samples_before(first)
            if total == 0:
                raise EmptyBufferError("cannot sample from an empty buffer")
            if num_chunks > total:
                self._tell_clamp(num_chunks, total)
                num_chunks = total
            drawn = torch.randint(0, total, (num_chunks,), generator=self._generator)
            prepared = contents.prepare(drawn.numpy(), first, index.end, columns)
        return nest(contents.read(prepared, out))

    def sample_trajectories(self, count: int) -> list[AnyTrajectory]:
        """Draw whole trajectories uniformly, without repetition, from the window; all if ``count`` is larger.

        Raises:
            EmptyBufferError: there is nothing to sample from.
        """
        with self._current() as contents:
            window = self._window_length(len(contents.index))
            if window == 0:
                raise EmptyBufferError("cannot sample from an empty buffer")
            drawn = torch.randperm(window, generator=self._generator)[:count]
            return [contents.get(contents.index.end - window + at) for at in drawn.tolist()]

    def _window_length(self, size: int) -> int:
        return min(size, self.sample_window_size) if self.sample_window_size > 0 else size

    def _tell_clamp(self, wanted: int, total: int) -> None:
        if not self._clamp_told:
            self._clamp_told = True
            logger.warning("sample(%d): the window has %d samples only, so that many are drawn", wanted, total)

    def get(self, trajectory_id: int) -> AnyTrajectory:
        """Return a trajectory by id, its tensors copied.

        Raises:
            TrajectoryUnavailableError: there is none, or it has left memory.
            CorruptStoreError: a file is missing or damaged.
        """
        with self._current() as contents:
            return contents.get(contents.index.position_of(trajectory_id))

    @contextmanager
    def _current(self) -> Iterator[Contents]:
        """Lock the contents; those that were replaced while waiting for their lock may lack files by now."""
        while True:
            contents = self._contents
            with contents.lock:
                if contents is self._contents:
                    yield contents
                    return

    # -- looking ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._contents.index)

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self._contents.index)

    @property
    def total_samples(self) -> int:
        """Number of samples, T·B summed over the trajectories."""
        with self._contents.lock:
            return self._contents.index.total_samples

    @property
    def trajectory_ids(self) -> npt.NDArray[np.int64]:
        """Ids of all trajectories, oldest first, as an int64 array."""
        with self._contents.lock:
            return np.array(self._contents.index["trajectory_id"], np.int64)

    @property
    def store_id(self) -> str | None:
        """UUID of the directory that this buffer writes to; None in memory only."""
        return None if self._writer is None else self._writer.catalog.store_id

    @property
    def trajectory_counter(self) -> int:
        """One more than the newest id."""
        return self._counter

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.size >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: trajectories, samples, cached trajectories and bytes, bytes waiting, mapped shards."""
        contents = self._contents
        with contents.lock:
            return {
                "num_trajectories": self.size,
                "total_samples": contents.index.total_samples,
                "cache_size": 0 if contents.cache is None else len(contents.cache),
                "cache_bytes": 0 if contents.cache is None else contents.cache.nbytes,
                "pending_bytes": 0 if self._writer is None else self._writer.pending_bytes,
                "mapped_shards": contents.residency.mapped,
            }

    def clear_cache(self) -> None:
        """Drop what the cache holds; what is nowhere else stays."""
        self._contents.clear_cache()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to draw on as if nothing had happened."""
        return {"seed": self.seed, "rng_state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the draws where :meth:`state_dict` left them."""
        self.seed = state["seed"]
        self._generator.set_state(state["rng_state"])

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
        with nullcontext() if self._writer is None else self._writer.keeping_files():
            self._save_checkpoint(save_path, layout)

    def _save_checkpoint(self, save_path: str | Path, layout: Layout) -> None:
        with self._current() as contents:
            state = CheckpointState(
                trajectory_format=self.trajectory_format,
                trajectory_counter=self._counter,
                seed=self.seed,
                rng_state=self._generator.get_state(),
            )
            cut = contents.cut()
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
        return self._writer.pin(name, **CheckpointState.rng_json(self.seed, self._generator.get_state()))

    def unpin(self, name: str) -> None:
        """Let go of a pin; evicted trajectories that only it named are deleted."""
        if self._writer is not None:
            self._writer.unpin(name)

    def load_checkpoint(
        self,
        load_path: str | Path,
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        strict: bool = True,
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
            strict: refuse an index that names absent files; else skip and count them.
            pin: name of a checkpoint inside the store.

        Returns:
            The number of trajectories that were skipped because their files are absent.

        Raises:
            StoreNotFoundError: there is nothing that can be loaded.
            IncompleteCheckpointError: files are absent (``strict``); lists them.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read.
        """
        self.flush()
        loaded = _Loaded(load_path, is_distributed, local_rank, world_size, strict, pin)
        skipped, state = self._load(loaded)
        self._loaded = loaded
        if self._writer is None and state.trajectory_format != self.trajectory_format:
            self._format = get_format(state.trajectory_format)
            self.trajectory_format = state.trajectory_format
        if state.seed is not None:
            self.seed = state.seed
        if state.rng_state is not None:
            self._generator.set_state(state.rng_state)
        elif state.seed is not None:
            self._generator = self._seeded(state.seed)
        return skipped

    def refresh(self) -> bool:
        """See what a live writer has committed to the loaded directory since; return whether anything changed."""
        if self._loaded is None:
            return False
        before = [source.generation for source in self._contents.sources]
        if all(not source.changed() for source in self._contents.sources):
            return False
        self._load(self._loaded)
        return [source.generation for source in self._contents.sources] != before

    def _load(self, loaded: _Loaded) -> tuple[int, CheckpointState]:
        result = load_sources(
            loaded.path,
            storage_options=self._storage_options,
            share=(loaded.local_rank, loaded.world_size) if loaded.is_distributed else None,
            strict=loaded.strict,
            pin=loaded.pin,
        )
        contents = self._new_contents()
        if self._writer is not None:
            self._own_source = contents.attach(StoreSource(self._writer.catalog))
        for source, part in result.parts:
            contents.show(contents.attach(source), part)
        with self._adding, self._contents.lock:
            self._contents = contents
            old, self._pins = self._pins, result.pins
        for pin in old:
            pin.release()
        self._counter = result.counter
        stride = loaded.world_size if loaded.is_distributed else 1
        first = result.next_id + (loaded.local_rank - result.next_id) % stride
        self._next_memory_id, self._memory_stride = max(first, self._next_memory_id), stride
        if self._writer is not None:
            self._own_first = self._writer.reserve_ids(first, stride)
        return result.skipped, result.state

    # -- the end ----------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        """Flush and give the directory back. Closing again does nothing.

        Args:
            wait: kept for callers of RLinf's buffer; what was added is always written first.

        Raises:
            StoreWriteError: something did not reach the disk; the buffer is closed all the same.
        """
        for pin in self._pins:
            pin.release()
        self._pins = []
        if self._writer is not None:
            self._finalizer.detach()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Loaded:
    """What ``load_checkpoint`` was asked for, so that ``refresh`` can ask again."""

    __slots__ = ("is_distributed", "local_rank", "path", "pin", "strict", "world_size")

    def __init__(
        self, path: str | Path, is_distributed: bool, local_rank: int, world_size: int, strict: bool, pin: str | None
    ) -> None:
        self.path = path
        self.is_distributed = is_distributed
        self.local_rank = local_rank
        self.world_size = world_size
        self.strict = strict
        self.pin = pin


class _Listener:
    """Tells a buffer what its writer did, without keeping the buffer alive."""

    def __init__(self, buffer: TrajectoryReplayBuffer) -> None:
        self._buffer = weakref.ref(buffer)
        self._committed = -1

    def metadata(self) -> Mapping[str, Any]:
        buffer = self._buffer()
        return {} if buffer is None else {"seed": buffer.seed}

    def committed(self, commits: Sequence[Commit]) -> None:
        buffer = self._buffer()
        if buffer is None:
            return
        self._committed = commits[-1].ids[-1]
        for commit in commits:
            buffer._contents.committed(buffer._own_source, commit.row, commit.ids, commit.columns)
        if buffer._on_commit is not None:
            for commit in commits:
                try:
                    buffer._on_commit(commit.ids)
                except Exception:  # a user's callback must not undo a commit
                    logger.exception("on_commit raised")

    def to_evict(self) -> Sequence[int]:
        buffer = self._buffer()
        if buffer is None or buffer.retention == Retention():
            return []
        contents = buffer._contents
        with contents.lock:
            index = contents.index
            # Only what is committed counts: a crash must not take the newer ones and find the older ones gone already.
            safe = int(np.searchsorted(index["trajectory_id"], self._committed, side="right"))
            positions = index.first + buffer.retention.to_evict(index.slice(0, safe))
            ids = contents.index.arrays["trajectory_id"][positions].tolist()
            loaded = [number for number in ids if number < buffer._own_first]
            if loaded:  # read in place from elsewhere: only forgotten here
                buffer._forget(loaded)
            return [number for number in ids if number >= buffer._own_first and not contents.is_pending(number)]

    def evicted(self, ids: Sequence[int]) -> None:
        buffer = self._buffer()
        if buffer is not None:
            buffer._forget(ids)


def _groups(records: Sequence[Record], nbytes: int) -> Iterator[list[Record]]:
    """Split a list so that each part, if it has more than one record, has at most this many bytes."""
    group: list[Record] = []
    total = 0
    for record in records:
        size = block_nbytes(record)
        if group and total + size > nbytes:
            yield group
            group, total = [], 0
        group.append(record)
        total += size
    if group:
        yield group


def _close_quietly(writer: StoreWriter) -> None:
    """Close the writer of a buffer that nobody closed; errors can only be logged by then."""
    if writer.is_own_thread():  # it held the last reference, while telling of a commit
        threading.Thread(target=_close_quietly, args=(writer,), name="trajstore-close").start()
        return
    try:
        writer.close()
    except StoreError as error:
        logger.error("%s", error)
