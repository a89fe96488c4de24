"""The replay buffer: a reader with a writer."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trajstore._core.base.arguments import check_kind, path_or_url, seconds_or_none, text, truth, whole, whole_or_none
from trajstore._core.base.extensions import extension
from trajstore._core.buffer.checkpoint import Layout
from trajstore._core.buffer.loading import Loaded, LoadRequest
from trajstore._core.buffer.mirroring import MirrorOfBuffer
from trajstore._core.buffer.points import Points
from trajstore._core.buffer.reader import Reader, unpickled
from trajstore._core.buffer.retention import Retention
from trajstore._core.buffer.saved_points import OwnStore
from trajstore._core.buffer.sink import Sink, StoreSink
from trajstore._core.buffer.view import View
from trajstore._core.columns.rollouts import flatten_rollouts
from trajstore._core.files.opening import check_options, directories_above, open_directory
from trajstore._core.formats import get_format
from trajstore._core.reading.places import check_no_store_above
from trajstore._core.sampling.base import Ids
from trajstore._core.sampling.draws import Draws
from trajstore._core.sessions.arguments import OpensSessions
from trajstore._core.store.run_ids import ids_from
from trajstore._core.writing.options import WriterOptions
from trajstore.errors import ConfigurationError, MissingDependencyError, StoreError, listed, trajectories
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    import torch

    from trajstore._core.sessions.session import Session
    from trajstore.remote.mirror.options import Mirror

logger = logging.getLogger(__name__)


class TrajectoryReplayBuffer(Reader, OpensSessions["Session"]):
    """A replay buffer of trajectories ``[T, B, ...]`` (or agent trajectories) on disk, or in memory only.

    With ``auto_save=True`` every trajectory is written to ``auto_save_path`` in the background; flushed trajectories
    survive a crash, and a buffer on an existing store continues it. With ``auto_save=False`` the newest
    ``sample_window_size`` trajectories are kept in memory; older ones are counted, as in RLinf, but never drawn. The
    first seven arguments, their defaults, and the samples for a seed are those of RLinf's buffer.
    ``TrajectoryReplayBuffer.open(path)`` returns a :class:`Reader`.

    Args:
        seed: seed of the sampling generator; None draws one from the system. ``load_checkpoint`` says when a load
            replaces it.
        enable_cache: keep written trajectories in memory. Useful only for formats that cannot be mapped, or slow
            disks.
        cache_size: number of trajectories in the cache (``auto_save=True``).
        sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
        auto_save: write trajectories to ``auto_save_path``.
        auto_save_path: directory or fsspec URL (``s3://bucket/run``); without ``auto_save`` a warning says that nothing
            is written there.
        trajectory_format: ``"pt"``, ``"pkl"`` or ``"zarr"``.
        cache_bytes: size limit of the cache (``auto_save=False``: of the trajectories in memory); None = no bound.
        retention: limits; the oldest trajectories beyond them are deleted.
        writer: threads and memory of the writer.
        format_options: options of the format (zarr: codec, chunking).
        storage_options: passed on to the fsspec file system of URLs; a local ``auto_save_path`` takes none.
        mirror: path or URL to which all commits are copied in the background, or a :class:`Mirror` with options
            (``auto_save=True``). The mirror can be opened like any store, and ``trajstore restore`` makes a store
            of it if this machine is lost. Adding never waits for it; see :attr:`mirror`.
        on_commit: called with the ids of each commit, in order, in its own thread without a lock, so it may call the
            buffer. ``close`` waits for it, ``flush`` does not. Its exceptions are logged.
        verify_shards: compare the checksums of a whole shard when it is read for the first time, so that changed
            bytes raise CorruptStoreError instead of being drawn. Costs one pass over each shard.
        store_frames_once: store each row of ``next_obs`` that equals, bit for bit, that of ``curr_obs`` at the next
            step only once on disk. Batches and trajectories are the same as without. For observations of at least 64
            bytes; a warning names those that do not repeat. None: True if earlier shards of the store have such
            rows, else False. Existing shards stay as they are.

    Raises:
        ConfigurationError: an argument is out of range, or ``auto_save_path`` has stores in ``rank_*`` folders, or is
            a directory of RLinf.
        StoreLockedError: another process writes to ``auto_save_path``.
        StoreWriteError: ``auto_save_path`` cannot be written.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: the existing store cannot be continued.
    """

    _warns_of_path = True
    """Whether ``auto_save_path`` without ``auto_save`` gives a warning."""

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
        store_frames_once: bool | None = None,
    ) -> None:
        check_kind("auto_save_path", auto_save_path, str | Path, "a path or URL")
        hint = f"; write Retention(max_trajectories={retention})" if isinstance(retention, int) else ""
        check_kind("retention", retention, Retention, f"a Retention{hint}")
        check_kind("writer", writer, WriterOptions, "WriterOptions")
        check_kind("format_options", format_options, Mapping, "a dict")
        check_kind("storage_options", storage_options, Mapping, "a dict")
        check_kind("on_commit", on_commit, Callable, "a function of the ids")
        auto_save, enable_cache = truth("auto_save", auto_save), truth("enable_cache", enable_cache)
        once = None if store_frames_once is None else truth("store_frames_once", store_frames_once)
        cache_size, cache_bytes = whole("cache_size", cache_size, 0), whole_or_none("cache_bytes", cache_bytes, 0)
        window_size = whole("sample_window_size", sample_window_size, 0)
        draws = Draws(whole_or_none("seed", seed, -(1 << 63), (1 << 64) - 1))
        path = str(auto_save_path or "")
        if auto_save and not path:
            raise ConfigurationError("auto_save_path: must be given when auto_save is true")
        unused = path if self._warns_of_path else ""
        idle = {f"auto_save_path={path!r}": unused, "writer": writer, "on_commit": on_commit, "store_frames_once": once}
        if retention is not None and retention.compress_after is not None:
            idle["retention.compress_after"] = True
            if find_spec("zarr") is None:
                raise MissingDependencyError("zarr", "zarr")
        if not auto_save and any(idle.values()):
            arguments = listed(name for name, value in idle.items() if value)
            warnings.warn(f"{arguments} has no effect without auto_save=True: nothing is written", stacklevel=2)
        if mirror is not None and not auto_save:
            raise ConfigurationError("mirror: needs auto_save=True; a buffer in memory has no store to be mirrored")
        self._path = path if auto_save else None
        new_format = get_format(trajectory_format, **(format_options or {}))
        options = dict(storage_options or {})
        bounds: tuple[int | None, int | None] | None = (cache_size, cache_bytes) if enable_cache else None
        if not auto_save:
            bounds = window_size or None, cache_bytes
        live = View(bounds, retention or Retention(), truth("verify_shards", verify_shards))
        self._sink: Sink = Sink(live)
        if auto_save:
            check_options(path, options)
            directory = open_directory(path, **options)
            check_no_store_above(directory, directories_above(directory, **options))
            writer, target = writer or WriterOptions(), None if mirror is None else _mirror_options(mirror)
            self._sink = StoreSink(live, draws, directory, new_format, once, writer, on_commit, target)
        super().__init__(live, draws, window_size, options)
        self._trajectory_format, self._format = trajectory_format, new_format

    # -- adding -----------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[AnyTrajectory]) -> list[int]:
        """Add trajectories and return their ids. All are checked before any is added.

        An empty block (no fields, or no samples) is skipped with a warning, and gets no id.
        The tensors are copied before this returns; writing continues in the background. When the memory for
        pending writes (``WriterOptions.max_pending_bytes``) is full, this waits. Trajectories that :meth:`get`
        returned with late values are added as recorded, with the values set again; this waits for a flush.

        Raises:
            InvalidTrajectoryError: fields do not fit together, or one has a value that cannot be stored and read
                back; names the field, and its shapes or value. Nothing was added.
            StoreWriteError: an earlier write failed; nothing was added. Each failure is raised once; unwritten
                trajectories stay in memory and are retried.
            UnwritableTrajectoryError: earlier trajectories could not be encoded; nothing was added.
            PartlyAddedError: the list needs more memory than a shard, and a later part of it failed as above; its
                ``ids`` are those of the added trajectories.
        """
        return self._sink.add(trajectories)

    def add_rollouts(
        self,
        columns: Mapping[str, torch.Tensor],
        lengths: torch.Tensor | Sequence[int],
        documents: Sequence[Mapping[str, Any]],
        *,
        prompts: torch.Tensor | Sequence[int] | None = None,
        starts: torch.Tensor | Sequence[int] | None = None,
    ) -> list[int]:
        """Add N rollouts whose columns are joined in tensors, as trainers hold them; return their ids.

        Stores the same as :meth:`add_trajectories` with an :class:`AgentTrajectory` for each rollout, at a fraction of
        the cost. L = tokens of a rollout, R = tokens of its response.

        Args:
            columns: by name. ``input_ids``, ``attention_mask`` and ``loss_mask`` have a value per token: packed
                ``[sum of L]``, or padded ``[N, width]``. ``old_log_probs``, ``entropys``, ``response_mask`` and
                ``rollout_log_probs`` have a value per token of the response: packed ``[sum of R]``, or padded on the
                right ``[N, width]``; they need ``prompts``. Dtypes as in :class:`AgentTrajectory`; on any device.
                Padding is not stored.
            lengths: L of each rollout, ``[N]``, whole numbers.
            documents: the other fields of :class:`AgentTrajectory` of each rollout, by name; absent and None ones are
                empty. ``reward`` is a :class:`Reward`, or a dict of its fields.
            prompts: tokens of each prompt, ``[N]``, stored as ``response_start``; R = L - prompt.
            starts: column of the first token in each row of padded ``input_ids``, ``attention_mask`` and
                ``loss_mask``, ``[N]``; None = 0, padded on the right only.

        Raises:
            InvalidTrajectoryError: sizes do not fit together, or a rollout has a value that cannot be stored; names
                the field, and the position of the rollout. Nothing was added.
            StoreWriteError, UnwritableTrajectoryError, PartlyAddedError: see :meth:`add_trajectories`.
        """
        return self._sink.add_flattened(flatten_rollouts(columns, lengths, documents, prompts, starts))

    def _open_session(self, fields: dict[str, Any]) -> Session:
        return self._sink.sessions.session(**fields)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything added before survives SIGKILL and power loss. Does nothing in memory only.

        Args:
            timeout: most seconds to wait for the threads that write trajectories; None: no limit. Not bounded are waits
                for processes that open sessions, for a snapshot or house-keeping under way, and the writing of late
                values and retention.

        Raises:
            StoreWriteError: a write failed; names the file. Unwritten trajectories are kept; call again.
            UnwritableTrajectoryError: some trajectories could not be encoded; all others are on disk.
            TimeoutError: trajectories were not written within ``timeout``.
        """
        self._sink.flush(seconds_or_none("timeout", timeout))

    def wait(self, ids: Sequence[int], timeout: float | None = None) -> bool:
        """Wait until trajectories are committed; return False after ``timeout`` seconds.

        Raises:
            StoreWriteError: they cannot be written at present.
        """
        wanted = ids_from("ids", ids)
        return self._sink.wait(wanted, seconds_or_none("timeout", timeout))

    def evict(self, ids: Ids) -> None:
        """Delete trajectories, durably. Files are removed when no pin and no reader needs them.

        Loaded trajectories are only hidden. Ids are numbers, or the texts shown for them (``"3/17"``).
        Trajectories of the buffer's own store that are hidden because of missing or truncated files can be deleted too.

        Raises:
            TrajectoryUnavailableError: an id is not in the buffer; nothing was deleted.
            StoreWriteError: the log could not be written and nothing was deleted; or pending trajectories could not be
                written, and all others were deleted.
        """
        wanted = ids_from("ids", ids)
        if len(wanted):
            self._live.check_shown(wanted)
            self._sink.evict(wanted)

    def clear(self) -> None:
        """Delete all trajectories. Their ids are never given again."""
        self.evict(self.trajectory_ids.tolist())

    def compact(self, *, compress: bool = False) -> None:
        """Free the disk space of evicted trajectories in shared shards, and merge small shards.

        The writer also does this in the background for shards at least half dead, once dead bytes exceed live ones by
        more than 1 MiB. This call continues until no shard has a dead row and at most one is small. It copies live
        rows; others may add and sample meanwhile. Does nothing in memory only.

        Args:
            compress: compress all shards with zstd (extra ``zarr``). They remain drawable, from the cache or decoded
                anew each time. ``Retention(compress_after=)`` does this for old shards as they age.

        Raises:
            MissingDependencyError: ``compress`` without the extra ``zarr``.
            StoreWriteError: it could not be written; the store is unchanged.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self._sink.compact(compress=truth("compress", compress))

    # -- points, mirror, checkpoints --------------------------------------------------------------

    @property
    def points(self) -> Points:
        """Saved points of this buffer's store, for going back, and pins."""
        return Points(self._own_store)

    @property
    def _own_store(self) -> OwnStore:
        return OwnStore(self._sink, self._live, self._draws)

    @property
    def mirror(self) -> MirrorOfBuffer:
        """The mirror of this buffer's store: its progress, and waiting for it."""
        return MirrorOfBuffer(self._sink)

    def load_checkpoint(
        self,
        load_path: str | Path,
        is_distributed: bool = False,
        local_rank: int | None = None,
        world_size: int | None = None,
        *,
        strict: bool | None = None,
        pin: str | None = None,
    ) -> int:
        """Replace the contents by those of a directory, which is read in place and never written to.

        A store, a checkpoint, a directory of RLinf, or a folder of ``rank_*`` directories, which are merged.
        Later additions go to this buffer's own path.

        The generator continues from a checkpoint's state, whatever this buffer's ``seed``; for a store, which does not
        record the generator's progress, it starts from the store's seed. With ``is_distributed`` and the same number of
        ranks as at saving, rank ``r`` continues that of ``rank_<r>``. With another number each rank starts from its own
        ``seed`` and its rank: no two draw alike, even with equal seeds. (A single directory of RLinf's: all ranks draw
        by its seed, as in RLinf.)

        Args:
            load_path: directory or URL.
            is_distributed: load only the contiguous share of ``local_rank`` among ``world_size`` ranks.
            local_rank: 0-based; needed with ``is_distributed``, without effect otherwise, as in RLinf.
            world_size: number of shares; likewise.
            strict: True refuses a directory with anything damaged or absent (shards' contents are not read: sizes are
                compared). False leaves out unreadable data, reconstructs the rest, and logs a warning for each. By
                default a directory of RLinf is loaded as in RLinf: checkpoints made in memory list more
                trajectories than they hold, which causes a warning; any other directory is refused. For RLinf's
                directories, True and False open every file (some tenths of a millisecond each) and refuse or leave out
                unreadable ones; by default these fail when drawn, as in RLinf. Files absent before the oldest existing
                one are counted by ``len`` and ``is_ready``, as in RLinf, and never drawn.
            pin: name of a pin of the store.

        Returns:
            The number of trajectories with absent files, or left out because of damage, as far as known: a rank whose
            folder is empty or gone counts as 0.

        Raises:
            StoreNotFoundError: there is nothing to load.
            IncompleteCheckpointError: files or ranks are absent, or files truncated (``strict``); lists them.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; names
                all unreadable ranks.
            StoreError: there is a store beside ``rank_*`` stores (``strict``).
            ConfigurationError: ``is_distributed`` without ``local_rank`` or ``world_size``: each rank would load all.
        """
        share = None
        if truth("is_distributed", is_distributed):
            given = {"local_rank": local_rank, "world_size": world_size}
            for name, number in given.items():
                if number is None or isinstance(number, float):
                    raise ConfigurationError(f"{name}: {number!r}, must be an int with is_distributed=True")
            share = whole("local_rank", local_rank, 0), whole("world_size", world_size, 1)
        strict = None if strict is None else truth("strict", strict)
        pin = None if pin is None else text("pin", pin)
        directory = open_directory(path_or_url("load_path", load_path), **self._storage_options)
        self._sink.flush()
        self._load(LoadRequest(directory, share, strict, pin))
        return self._left_out

    def _load(self, request: LoadRequest) -> None:
        super()._load(request)
        self._live.tell_hidden()
        self._sink.retain()

    def _take_up(self, loaded: Loaded) -> None:
        kept = self._trajectory_format, self._format
        super()._take_up(loaded)
        if isinstance(self._sink, StoreSink):
            self._trajectory_format, self._format = kept

    def _show(self, request: LoadRequest) -> Loaded:
        contents, loaded = self._live.open(request)
        with self._sink.lock:
            self._live.replace(request, contents, loaded)
            self._sink.go_on(loaded.counter, request.first_id(loaded.next_id), request.stride)
        return loaded

    def refresh(self) -> bool:
        changed = super().refresh()
        self._sink.retain()
        return changed

    def _follow(self, request: LoadRequest) -> bool:
        with self._sink.lock:
            next_id = self._live.follow()
            if next_id is not None:
                self._sink.go_on(next_id, request.first_id(next_id), request.stride)
                return True
        added = self._live.contents.added
        if added:
            kept = isinstance(self._sink, StoreSink)
            logger.warning(
                "refresh: reloads, which hides %s added here since; %s",
                trajectories(added),
                "they stay in its own store" if kept else "they were in memory only and are lost",
            )
        return False

    def _keeping_files(self) -> AbstractContextManager[object]:
        return self._sink.keeping_files()

    # -- properties -------------------------------------------------------------------------------

    @property
    def _grows(self) -> bool:
        """True: trajectories may be added."""
        return True

    @property
    def store_id(self) -> str | None:
        """UUID of the buffer's own store; None in memory only."""
        return self._sink.store_id

    @property
    def _trajectory_counter(self) -> int:
        """One more than the newest id."""
        return self._sink.counter

    def get_stats(self) -> dict[str, float]:
        """Return the statistics of a reader, and those of the buffer's own store.

        Every trajectory up to the id ``committed`` survives a crash; -1 before the first. ``pending_bytes`` wait to be
        written. ``live_bytes`` are of its trajectories, ``shard_bytes`` of the files that these and its pins need,
        ``held_bytes`` of files kept only because a reader still shows evicted trajectories.
        """
        return {**super().get_stats(), **self._sink.figures(), "committed": self._sink.committed}

    def save_checkpoint(self, save_path: str | Path, *, layout: Layout = "trajstore") -> None:
        self._sink.flush()
        self._sink.take_in_values()
        super().save_checkpoint(save_path, layout=layout)

    # -- the end ----------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        """Flush and release the directory. Closing again does nothing.

        Loaders stop yielding its batches. Releases the reader's lease: its trajectories can be sampled only as long as
        their files exist.

        Args:
            wait: for compatibility with RLinf's buffer; additions are always written first.

        Raises:
            StoreWriteError: a write failed; the buffer is closed all the same.
        """
        super().close()
        self._sink.close()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Send a buffer that has added nothing to another process, which opens the same load.

        Raises:
            StoreError: the buffer writes, or holds trajectories that exist in memory only; names the alternative.
        """
        if isinstance(self._sink, StoreSink):
            raise StoreError(
                f"{self._path}: a buffer with a writer cannot be sent to another process, because a store "
                f"has one writer; make a buffer there, load_checkpoint({self._path!r}), and refresh() to "
                "follow, or record to a directory per process: rank_0, rank_1, ... in one folder"
            )
        if self._live.locked(lambda contents: bool(contents.snapshot().memory)):
            raise StoreError(
                "this buffer has trajectories that are in the memory of this process only; call save_checkpoint, and "
                "load_checkpoint in the other process"
            )
        make = partial(
            TrajectoryReplayBuffer,
            None,
            sample_window_size=self.sample_window_size,
            trajectory_format=self._trajectory_format,
            cache_bytes=self._live.cache_bytes,
            retention=self._live.retention,
            storage_options=self._storage_options,
            verify_shards=self._live.verify_shards,
        )
        return unpickled, (make, self._live.request, self._live.store_ids, pickle.dumps(self.state_dict()))


def _mirror_options(mirror: str | Path | Mirror) -> Mirror:
    """Convert the argument ``mirror`` to options."""
    return cast("Mirror", extension("mirror options").as_mirror(mirror))
