"""The replay buffer: a facade over its backing, its view, draws and checkpoints. Adding, evicting, opening, closing."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from trajstore.arguments import (
    check_kind,
    path_or_url,
    rank_of_ranks,
    seconds_or_none,
    truth,
    whole,
    whole_or_none,
)
from trajstore.buffer.backing import Backing, ReaderBacking, StoreBacking
from trajstore.buffer.loading import LoadRequest
from trajstore.buffer.restorable import RestorableBuffer
from trajstore.buffer.retention import Retention
from trajstore.buffer.view import View
from trajstore.closing import Closing
from trajstore.errors import ConfigurationError, StoreError, StoreNotFoundError, listed
from trajstore.files.opening import check_options, directories_above, open_directory
from trajstore.formats import get_format
from trajstore.mirroring.options import Mirror, as_mirror
from trajstore.reading.places import check_no_store_above
from trajstore.sampling.draws import Draws
from trajstore.store.run_ids import ids_from
from trajstore.trajectory import AnyTrajectory
from trajstore.writing.options import WriterOptions


class TrajectoryReplayBuffer(RestorableBuffer, Closing):
    """A replay buffer of trajectories ``[T, B, ...]`` (or agent trajectories) on disk, or in memory only.

    With ``auto_save=True`` every trajectory is written to ``auto_save_path`` in the background; what was
    flushed survives a crash, and a buffer made on a directory that holds a store continues it. With
    ``auto_save=False`` the newest ``sample_window_size`` trajectories are kept in memory; older ones are
    counted, as RLinf does, but never drawn. The first seven arguments, their defaults, and the samples drawn
    for a seed are those of RLinf's buffer.

    Args:
        seed: seed of the generator that draws samples; None draws one from the system. ``load_checkpoint`` says when
            what was loaded replaces it.
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
        storage_options: passed on to the fsspec file system of URLs; a local ``auto_save_path`` takes none.
        mirror: path or URL to which everything committed is copied in the background, or a :class:`Mirror` with options
            (``auto_save=True``). What is there can be opened like any store, and ``trajstore restore`` makes a store
            of it after this machine is lost. Adding never waits for it; see :attr:`mirror`.
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
        mirror: str | Path | Mirror | None = None,
        on_commit: Callable[[Sequence[int]], None] | None = None,
        verify_shards: bool = False,
    ) -> None:
        check_kind("auto_save_path", auto_save_path, str | Path, "a path or URL")
        hint = f"; write Retention(max_trajectories={retention})" if isinstance(retention, int) else ""
        check_kind("retention", retention, Retention, f"a Retention{hint}")
        check_kind("writer", writer, WriterOptions, "WriterOptions")
        check_kind("format_options", format_options, Mapping, "a dict")
        check_kind("storage_options", storage_options, Mapping, "a dict")
        check_kind("mirror", mirror, str | Path | Mirror, "a path, a URL, or a Mirror")
        check_kind("on_commit", on_commit, Callable, "a function of the ids")
        auto_save, enable_cache = truth("auto_save", auto_save), truth("enable_cache", enable_cache)
        cache_size, cache_bytes = whole("cache_size", cache_size, 0), whole_or_none("cache_bytes", cache_bytes, 0)
        window_size = whole("sample_window_size", sample_window_size, 0)
        draws = Draws(whole_or_none("seed", seed, -(1 << 63), (1 << 64) - 1))
        path = str(auto_save_path or "")
        if auto_save and not path:
            raise ConfigurationError("auto_save_path: must be given when auto_save is true")
        idle = {f"auto_save_path={path!r}": path, "writer": writer, "on_commit": on_commit}
        if not auto_save and any(idle.values()):
            told = listed(name for name, value in idle.items() if value)
            warnings.warn(f"{told} has no effect without auto_save=True: nothing is written", stacklevel=2)
        if mirror is not None and not auto_save:
            raise ConfigurationError("mirror: needs auto_save=True; a buffer in memory has no store to be mirrored")
        self.auto_save = auto_save
        self.auto_save_path = path if auto_save else None
        self.trajectory_format = trajectory_format
        self._format = get_format(trajectory_format, **(format_options or {}))
        self._storage_options = options = dict(storage_options or {})
        bounds: tuple[int | None, int | None] | None = (cache_size, cache_bytes) if enable_cache else None
        if not auto_save:
            bounds = window_size or None, cache_bytes
        view = View(bounds, retention or Retention(), truth("verify_shards", verify_shards))
        backing = Backing(view)
        if auto_save:
            check_options(path, options)
            directory = open_directory(path, **options)
            check_no_store_above(directory, directories_above(directory, **options))
            writer, target = writer or WriterOptions(), as_mirror(mirror)
            backing = StoreBacking(view, draws, directory, self._format, writer, on_commit, target)
        super().__init__(view, draws, backing, window_size)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        pin: str | None = None,
        share: tuple[int, int] | None = None,
        strict: bool | None = None,
        seed: int | None = None,
        sample_window_size: int = 0,
        verify_shards: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Open what lies at a path for reading, whoever writes there meanwhile; nothing is ever written to it.

        A store, a checkpoint, a directory of RLinf, or a run with one folder per rank. All trajectories are shown as
        they were at this moment; :meth:`refresh` shows what was committed since. Adding is refused.

        Args:
            path: directory or URL.
            pin: name of a pin, whose trajectories are shown instead of the newest ones.
            share: (rank, number of ranks): show only this rank's contiguous share.
            strict: as for :meth:`load_checkpoint`.
            seed: of the generator that draws, kept as it is; None: that of the store, and of a checkpoint also how far
                it had drawn. Of a share among another number of ranks than have saved: that of the store and the rank.
            sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
            verify_shards: compare the checksums of each shard when it is read for the first time.
            storage_options: passed on to the fsspec file system.

        Raises:
            StoreNotFoundError: there is nothing that can be read; says what is there.
            IncompleteCheckpointError, CorruptStoreError, UnsafeContentError, UnsupportedVersionError: as for
                :meth:`load_checkpoint`.
        """
        path_or_url("path", path)
        share = None if share is None else rank_of_ranks("share", share)
        check_options(path, storage_options or {})
        buffer = cls(
            seed, sample_window_size=sample_window_size, verify_shards=verify_shards, storage_options=storage_options
        )
        buffer._read_only()
        state = buffer.state_dict()
        rank, ranks = share or (0, 1)
        buffer.load_checkpoint(path, share is not None, rank, ranks, strict=strict, pin=pin)
        if seed is not None:
            buffer.load_state_dict(state)
        return buffer

    def _read_only(self) -> None:
        self._backing = self._internals.backing = ReaderBacking(self._view)

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
            PartlyAddedError: the list needs more memory than a shard, and what is above befell a later part of it; its
                ``ids`` are those of the trajectories that were added.
            PendingFullError: no room for more waiting writes (``on_full="raise"``).
        """
        return self._backing.add(trajectories)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything added before survives SIGKILL and power loss. Nothing to do in memory only.

        Raises:
            StoreWriteError: a write failed; names the file. What was not written is kept; call again.
            UnwritableTrajectoryError: trajectories could not be written for their own sake; all others are on disk.
            TimeoutError: ``timeout`` seconds passed.
        """
        self._backing.flush(seconds_or_none("timeout", timeout))

    def wait(self, ids: Sequence[int], timeout: float | None = None) -> bool:
        """Wait until trajectories are committed; return whether all are (False after ``timeout`` seconds).

        Raises:
            StoreWriteError: they cannot be written at present.
        """
        wanted = ids_from("ids", ids)
        return self._backing.wait(wanted, seconds_or_none("timeout", timeout))

    def evict(self, ids: Sequence[int | str]) -> None:
        """Delete trajectories, durably. Files go when no pin and no reader needs them.

        What was loaded is shown no longer, and stays where it is. Ids are numbers, or as they are shown (``"3/17"``).

        Those of the buffer's own store that are not shown because their files are missing or cut can be deleted too.

        Raises:
            TrajectoryUnavailableError: an id is not in the buffer; nothing was deleted.
            StoreWriteError: the log could not be written; nothing was deleted. Or trajectories that wait to be written
                could not be; all others were deleted.
        """
        wanted = ids_from("ids", ids)
        if not wanted:
            return
        self._view.check_shown(wanted)
        self._backing.evict(wanted)

    def clear(self) -> None:
        """Delete all trajectories. Ids go on; they are never given twice."""
        self.evict(self.trajectory_ids.tolist())

    def compact(self) -> None:
        """Give back the disk space that evicted trajectories have in shards of live ones, and unite small shards.

        The writer does this by itself, in the background, for shards of which half or more is dead, as soon as the dead
        bytes exceed the live ones by more than 1 MiB. This goes on until no shard has a dead row and no two small ones
        are left. It copies what it keeps; others may add and sample meanwhile. Nothing to do in memory only.

        Raises:
            StoreWriteError: it could not be written; the store is as it was.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self._backing.compact()

    # -- the end ----------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        """Flush and give the directory back. Closing again does nothing.

        Loaders give no more batches of it. Releases the reader's lease: what it showed can be sampled only as long as
        its files are there.

        Args:
            wait: kept for callers of RLinf's buffer; what was added is always written first.

        Raises:
            StoreWriteError: something did not reach the disk; the buffer is closed all the same.
        """
        self._view.release()
        self._backing.close()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Send a buffer that only reads to another process, which opens what this one loaded, by its absolute path.

        What lies there must be the same store then: else unpickling raises StoreNotFoundError.

        Raises:
            StoreError: the buffer writes, or holds trajectories that are nowhere else; says what to do instead.
        """
        if self._backing.keeps:
            raise StoreError(
                f"{self.auto_save_path}: a buffer that writes stays in its process, as a store has one writer; in the "
                f"other process make a buffer, load_checkpoint({self.auto_save_path!r}), and refresh() to follow"
            )
        if self._view.locked(lambda contents: bool(contents.snapshot().memory)):
            raise StoreError(
                "this buffer has trajectories that are in the memory of this process only; call save_checkpoint, and "
                "load_checkpoint in the other process"
            )
        options = {
            "sample_window_size": self.sample_window_size,
            "trajectory_format": self.trajectory_format,
            "cache_bytes": self._view.cache_bytes,
            "retention": self._view.retention,
            "storage_options": self._storage_options,
            "verify_shards": self._view.verify_shards,
        }
        reads = isinstance(self._backing, ReaderBacking)
        # As bytes: torch would send a tensor as an open file, of which there are few.
        return _reopened, (options, self._view.request, self._view.store_ids, pickle.dumps(self.state_dict()), reads)


def _reopened(
    options: Mapping[str, Any], request: LoadRequest | None, store_ids: Sequence[str], state: bytes, reads: bool
) -> TrajectoryReplayBuffer:
    """Return a buffer that reads what another process had loaded; ``reads``: it was opened for nothing else.

    Raises:
        StoreNotFoundError: another store lies there now.
    """
    buffer = TrajectoryReplayBuffer(seed=None, **options)
    if reads:
        buffer._read_only()
    if request is not None:
        buffer._load(request)
        gone = set(store_ids) - set(buffer._view.store_ids)
        if gone:
            raise StoreNotFoundError(
                f"{request.directory.url}: the buffer that was sent reads the store {listed(sorted(gone))}, which does "
                f"not lie there now; what does is {listed(sorted(buffer._view.store_ids)) or 'no store'}"
            )
    buffer.load_state_dict(pickle.loads(state))
    return buffer
