"""The part of the buffer that saves and restores: checkpoints, points, what is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from trajstore.arguments import one_of, path_or_url, text, truth, whole
from trajstore.buffer.checkpoint import CheckpointState, Layout, check_target, save_checkpoint
from trajstore.buffer.loading import Loaded, LoadRequest
from trajstore.buffer.mirroring import MirrorOfBuffer
from trajstore.buffer.readable import ReadableBuffer
from trajstore.buffer.saved_points import PointsOfBuffer
from trajstore.files.opening import directories_above, open_directory
from trajstore.formats import get_format
from trajstore.formats.base import TrajectoryFormat
from trajstore.reading.contents import Contents
from trajstore.reading.read_snapshot import ReadSnapshot

logger = logging.getLogger(__name__)


class RestorableBuffer(ReadableBuffer):
    """What a buffer shows can be saved, and replaced by what was saved. Users make a ``TrajectoryReplayBuffer``.

    Attributes:
        trajectory_format: name of the format of new shards.
    """

    trajectory_format: str
    _format: TrajectoryFormat
    """The same, with its options."""
    _storage_options: Mapping[str, Any]
    """Passed on to the fsspec file system."""

    # -- state ------------------------------------------------------------------------------------

    def save_checkpoint(self, save_path: str | Path, *, layout: Layout = "trajstore") -> None:
        """Save everything that is in the buffer now to a directory of its own; adding may go on meanwhile.

        Files are hard-linked where the file system can, else copied; the directory appears whole or not at
        all. With ``auto_save=False``, trajectories that have left memory are not saved.

        Args:
            save_path: directory or URL; absent, empty, or an earlier checkpoint, which is replaced.
            layout: ``"trajstore"``, or ``"rlinf"`` for a directory that RLinf reads.

        Raises:
            ConfigurationError: the directory is a store, lies within one, or holds other files; nothing was written.
            StoreWriteError: it could not be written; an earlier checkpoint is still there.
        """
        target = open_directory(path_or_url("save_path", save_path), **self._storage_options)
        one_of("layout", layout, get_args(Layout))
        check_target(target, directories_above(target, **self._storage_options))
        self._backing.flush()

        def look(contents: Contents) -> tuple[CheckpointState, ReadSnapshot]:
            state = CheckpointState(
                trajectory_format=self.trajectory_format,
                trajectory_counter=self._backing.intake.counter,
                seed=self.seed,
                rng_state=self._draws.rng_state,
            )
            return state, contents.snapshot()

        with self._view.steady, self._backing.keeping_files():
            state, snapshot = self._view.locked(look)
            save_checkpoint(target, snapshot, state, self._format, layout)

    @property
    def points(self) -> PointsOfBuffer:
        """Moments of this buffer's store that are kept: saved points, to which it can go back, and pins."""
        return PointsOfBuffer(self._backing, self._view, self._draws)

    @property
    def mirror(self) -> MirrorOfBuffer:
        """The mirror of this buffer's store: how far it is, and waiting for it."""
        return MirrorOfBuffer(self._backing)

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
        Later additions go to this buffer's own path.

        The generator takes up where the checkpoint left it, whatever ``seed`` this buffer was made with; for a store,
        which does not say how far it had drawn, it begins with the store's seed. With ``is_distributed``, rank ``r`` of
        as many ranks as have saved takes up that of ``rank_<r>``. Of another number each begins anew by its own
        ``seed`` and its rank: no two draw alike, also with equal seeds. (Of a single directory of RLinf's all
        ranks draw by its seed, as with RLinf.)

        Args:
            load_path: directory or URL.
            is_distributed: load only the contiguous share of ``local_rank`` among ``world_size`` ranks.
            local_rank: 0-based.
            world_size: number of shares.
            strict: refuse a directory of which anything is damaged or absent (True; what lies in shards is not read:
                sizes are compared), or leave out what cannot be read, work out what can be, and log a warning on each
                (False). By default a directory of RLinf is loaded as RLinf loads it: its usual checkpoints in memory
                only list more trajectories than they hold, which is told in a warning; any other directory is refused.
                Of RLinf's directories, True and False open every file (some tenths of a millisecond each): one that
                cannot be read is refused or left out; by default it fails when it is drawn, as in RLinf. Files absent
                before the oldest one that is there are counted by ``len`` and ``is_ready``, as RLinf counts them, and
                never drawn.
            pin: name of a pin of the store.

        Returns:
            The number of trajectories whose files are absent, or which were left out because they are damaged, as far
            as it can be told: of a rank whose folder is empty or gone nobody knows how many it had.

        Raises:
            StoreNotFoundError: there is nothing that can be loaded.
            IncompleteCheckpointError: files or ranks are absent, or files cut (``strict``); lists them.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; names
                all ranks that cannot be.
            StoreError: a store lies beside ``rank_*`` stores (``strict``).
        """
        share = None
        if truth("is_distributed", is_distributed):
            share = whole("local_rank", local_rank, 0), whole("world_size", world_size, 1)
        strict = None if strict is None else truth("strict", strict)
        pin = None if pin is None else text("pin", pin)
        directory = open_directory(path_or_url("load_path", load_path), **self._storage_options)
        return self._load(LoadRequest(directory, share, strict, pin))

    def _load(self, request: LoadRequest) -> int:
        self._backing.flush()
        with self._view.steady:
            loaded = self._show(request)
        self._view.tell_hidden()
        self._backing.retain()
        state = loaded.state
        if not self._backing.keeps and state.trajectory_format != self.trajectory_format:
            self._format = get_format(state.trajectory_format)
            self.trajectory_format = state.trajectory_format
        if loaded.new_rank is None:
            self._draws.take_up(state.seed, state.rng_state)
        else:
            self._draws.begin_for_rank(state.seed, *loaded.new_rank)
        return loaded.skipped

    def _show(self, request: LoadRequest) -> Loaded:
        """Show what a request names instead of what is shown; the caller holds ``View.steady``."""
        contents, loaded = self._view.open(request)
        intake = self._backing.intake
        with intake.lock:
            self._view.replace(request, contents, loaded)
            intake.go_on(loaded.counter, request.first_id(loaded.next_id), request.stride)
        return loaded

    def refresh(self) -> bool:
        """See what a live writer has committed to the loaded directory since; return whether it has committed anything.

        That may be nothing that is shown: shards that were rewritten, or, where a pin is shown, what the pin does not
        name.

        Of one store that is shown whole this takes the time of what is new; what was mapped and cached stays. A
        share, a pin, the ranks of a run, and a store whose log has been written into its index since, are loaded again.

        Raises:
            StoreNotFoundError: what was loaded is there no longer, such as a pin that was let go of.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; nothing changed.
        """
        view, intake = self._view, self._backing.intake
        with view.steady:
            before = view.generations
            request = view.request_if_changed()
            if request is None:
                return False
            with intake.lock:
                next_id = view.follow()
                if next_id is not None:
                    intake.go_on(next_id, request.first_id(next_id), request.stride)
            if next_id is None:
                if view.contents.added:
                    kept = self._backing.keeps
                    logger.warning(
                        "refresh: loads again, and no longer shows the %d trajectories that were added here since; %s",
                        view.contents.added,
                        "they stay in its own store" if kept else "they were in memory only and are lost",
                    )
                self._show(request)
            changed = view.generations != before
        self._backing.retain()
        return changed
