"""Takes additions: copies, numbers and shows trajectories, and queues them for the store if there is one."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore._core.base import locks
from trajstore._core.base.exits import forget, remember
from trajstore._core.base.extensions import extension
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.adding_again import add_with_values, has_late_values
from trajstore._core.buffer.content_watch import ColumnWatch, ContentWatch, as_list, flatten_all
from trajstore._core.buffer.retention import Retention
from trajstore._core.buffer.session_rows import BufferSessions
from trajstore._core.buffer.view import View
from trajstore._core.columns.flat import Copied, FlatTrajectories, copied, cut
from trajstore._core.columns.memory import Arena
from trajstore._core.files.base import Directory
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats.base import TrajectoryFormat
from trajstore._core.reading.places import check_no_ranks, check_not_rlinf
from trajstore._core.sampling.draws import Draws
from trajstore._core.sessions.records import CALLS_FOLDER
from trajstore._core.sessions.sessions import warn_of_open
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.log_records import ids_in_words
from trajstore._core.store.notes import Note
from trajstore._core.store.row_notes import Rows
from trajstore._core.writing.groups import Batch, random_uuids
from trajstore._core.writing.opening import warn_of_mirror
from trajstore._core.writing.options import WriterOptions
from trajstore._core.writing.writer import StoreWriter
from trajstore.errors import (
    ConfigurationError,
    PartlyAddedError,
    StoreError,
    TrajectoryUnavailableError,
    counted,
    trajectories,
    written,
)
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    from trajstore.remote.mirror.mirror import StoreMirror
    from trajstore.remote.mirror.options import Mirror

logger = logging.getLogger(__name__)

_UNLIMITED = Retention()


class Sink:
    """Keeps additions in memory, within the limits of cache and retention. Thread-safe.

    Attributes:
        lock: held while additions are shown and while the contents are replaced.
        counter: one more than the newest id.
        store_id: UUID of the store; None without one.
        mirror: copies the store to another place, if there is a mirror.
    """

    store_id: str | None = None
    mirror: StoreMirror | None = None

    def __init__(self, view: View) -> None:
        self.lock = locks.rlock("Sink.lock")
        self.counter = 0
        self._view = view
        self._watch = ColumnWatch()
        self._content = ContentWatch()
        self._arena = Arena(0)
        self._next_id = 0
        self._stride = 1

    def add(self, trajectories: Iterable[AnyTrajectory]) -> list[int]:
        """Add trajectories and return their ids."""
        trajectories = as_list(trajectories)
        late = sum(map(has_late_values, trajectories))
        return self._add_late(trajectories, late) if late else self._add_recorded(trajectories)

    def _add_late(self, trajectories: list[AnyTrajectory], late: int) -> list[int]:
        """Add trajectories of which ``late`` have late values."""
        logger.warning(
            "%s late values, which a buffer in memory lacks: they stay in metadata['trajstore.notes'], and corrected "
            "rewards count as recorded ones; use auto_save=True",
            counted(late, "trajectory", "has", "have"),
        )
        return self._add_recorded(trajectories)

    def _add_recorded(self, trajectories: list[AnyTrajectory]) -> list[int]:
        return self.add_flattened(flatten_all(trajectories))

    def add_flattened(self, runs: Sequence[FlatTrajectories], uuids: bytes | None = None) -> list[int]:
        """Add trajectories that are checked and flattened into columns; return their ids.

        Args:
            runs: see :func:`trajstore._core.columns.conversion.flatten`; copied before this returns.
            uuids: UUID of each, 16 bytes; merged directories count trajectories of the same UUID once. None for random
                ones, of trajectories whose content is not checked for doubts yet.

        Raises:
            StoreWriteError, UnwritableTrajectoryError: see ``add_trajectories``.
            ConfigurationError: the numbers of UUIDs and trajectories differ.
        """
        count = sum(map(len, runs))
        if uuids is not None and len(uuids) != 16 * count:
            raise ConfigurationError(f"uuids: {len(uuids)} bytes, must be 16 for each of {trajectories(count)}")
        self._watch.look(runs)
        return self._add(runs, uuids, count) if count else []

    def _add(self, runs: Sequence[FlatTrajectories], uuids: bytes | None, count: int) -> list[int]:
        """Add ``count`` trajectories, copying their tensors; ``uuids``: 16 bytes each, None = random ones."""
        copies = self._copied(runs, uuids)
        with self.lock:
            ids = [self._next_id + i * self._stride for i in range(count)]
            self._next_id = ids[-1] + self._stride  # first: an interrupted call leaves a gap, never a repeated id
            self.counter = ids[-1] + 1
            self._view.contents.add(copies, ids, uuids or random_uuids(count), pending=False)
            self._view.forget(self._view.to_evict(ids[-1]))
        return ids

    def _copied(self, runs: Sequence[FlatTrajectories], uuids: bytes | None) -> list[Copied]:
        """Copy trajectories; warn of doubtful ones unless another process did."""
        copies = copied(runs, self._arena)
        if uuids is None:
            self._content.look(copies)
        return copies

    def go_on(self, counter: int, first: int, stride: int) -> None:
        """Set the next ids after a load; the caller holds the lock.

        Args:
            counter: one more than the newest loaded id.
            first: lowest id to give out; lower ones are skipped, none is given twice.
            stride: distance between ids.
        """
        self.counter = counter
        self._next_id, self._stride = max(first, self._next_id), stride

    def share_ids(self, rank: int, ranks: int, *, at_least: int = 0) -> int:
        """Give out only ids that are ``rank`` modulo ``ranks`` from now on, so that ids are unique over stores.

        Args:
            rank: of this store.
            ranks: largest possible number of ranks.
            at_least: no lower id is given out from now on.

        Returns:
            The next id. Every lower id is shown already, or will never exist.

        Raises:
            StoreError: the buffer has no store (``auto_save=False``).
        """
        raise StoreError("share_ids: this buffer has no store of its own; use auto_save=True")

    def retain(self) -> None:
        """Evict trajectories beyond the limits, before the next addition; loaded ones are only hidden."""
        if self._view.retention == _UNLIMITED:
            return
        before = len(self._view.contents.index)
        self._retain()
        after = len(self._view.contents.index)
        if after < before:
            logger.info("retention: %d of %d trajectories are no longer shown", before - after, before)

    def _retain(self) -> None:
        """Evict trajectories beyond the limits."""
        newest = self._view.newest_id()
        if newest is not None:
            self._view.forget(self._view.to_evict(newest))

    def evict(self, ids: IntArray) -> None:
        """Delete trajectories, all of which are shown."""
        self._view.forget(ids)

    @property
    def committed(self) -> int:
        """Highest id up to which everything survives a crash; -1 before the first."""
        return -1

    def wait(self, ids: IntArray, timeout: float | None) -> bool:
        """Wait until trajectories are committed; return False on timeout."""
        return False

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything added before survives a crash."""

    @property
    def sessions(self) -> BufferSessions:
        """The sessions of the store.

        Raises:
            StoreError: there is no store.
        """
        raise StoreError("session: this buffer has no store of its own; use auto_save=True, with a local path")

    def warn_of_open(self, what: str) -> None:
        """Warn of the sessions that are not in the store yet; ``what`` happens to them."""

    def take_in_values(self) -> None:
        """Apply the late values in the inbox, from other processes."""

    def compact(self, *, compress: bool = False) -> int:
        """Free the disk space of evicted trajectories; return the number of damaged shards, which stay as they are."""
        return 0

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Set late values of the store's trajectories, and values by row, one tensor per trajectory.

        Raises:
            StoreError: there is no store.
        """
        raise StoreError(
            "annotate: this buffer has no store of its own; give the path of the store, or use auto_save=True"
        )

    def check_values(self, ids: Sequence[int], update: LateValues) -> None:
        """Refuse late values that contradict the store's, or whose trajectories among ``ids`` are absent."""
        raise StoreError("annotate: this buffer has no store of its own")

    def history(self, trajectory_id: int) -> list[Note]:
        """Return the late values of a trajectory of the store."""
        raise StoreError("notes_of: this buffer has no store of its own; give the path of the store")

    def commits(self) -> tuple[str, int, int]:
        """Return the store's UUID, an id above all committed ones, and the number of its rollbacks."""
        raise StoreError("this buffer has no store of its own")

    def keeping_files(self) -> AbstractContextManager[object]:
        """Keep files to be linked or copied, also those of evicted trajectories."""
        return nullcontext()

    def figures(self) -> dict[str, float]:
        """Return statistics of pending writes and disk space."""
        names = ("pending_bytes", "write_retries", "set_aside", "live_bytes", "shard_bytes", "held_bytes")
        return dict.fromkeys(names, 0)

    def close(self) -> None:
        """Write pending trajectories, and release the directory."""


class StoreSink(Sink):
    """Writes additions to a store, which it creates or continues.

    Args:
        view: contents of the buffer.
        draws: its seed goes into the store's metadata.
        directory: of the store.
        trajectory_format: of new shards.
        once: see :class:`StoreWriter`.
        options: of the writer.
        on_commit: the user's callback.
        mirror: options of the mirror.
    """

    def __init__(
        self,
        view: View,
        draws: Draws,
        directory: Directory,
        trajectory_format: TrajectoryFormat,
        once: bool | None,
        options: WriterOptions,
        on_commit: Callable[[Sequence[int]], None] | None,
        mirror: Mirror | None,
    ) -> None:
        super().__init__(view)
        mirroring = None if mirror is None else extension("mirrors")
        target = None if mirroring is None else mirroring.mirror_directory(mirror, directory)
        check_no_ranks(directory)
        check_not_rlinf(directory)  # before any write there, even of the lock
        self._on_commit = on_commit
        self._sessions: BufferSessions | None = None
        format_name = trajectory_format.name

        def metadata() -> Mapping[str, Any]:
            return {"trajectory_format": format_name, "seed": draws.seed}

        callback = None if on_commit is None else partial(_call_on_commit, weakref.ref(self))
        after = view.retention.compress_after
        self.writer = StoreWriter(directory, trajectory_format, once, options, metadata, view, after, callback)
        if mirroring is None:
            warn_of_mirror(directory)
        else:
            self.mirror = mirroring.StoreMirror(self.writer.log, mirror, target, metadata)
        # Releases the lock after an interrupt at any point, unless the writer is closed first.
        self._finalizer = weakref.finalize(self, _close_quietly, self.mirror, self.writer)
        self._finalizer.atexit = False  # too late for zarr; see trajstore._core.base.exits
        remember(self.writer)
        if self.mirror is not None:
            remember(self.mirror)
        self.writer.start()
        catalog = self.writer.log.catalog
        self.store_id = catalog.store_id
        view.show_own(catalog)
        if len(catalog.index):
            newest = int(catalog.index["shard"][-1])
            self._watch.begin(catalog.shards.schema(newest))
            _tell_format(directory, catalog.shards.manifest(newest).format, format_name)
        if not self._may_have_sessions():
            self.retain()
        self.counter = catalog.next_id
        self._shard_bytes = options.shard_bytes
        self._arena = Arena(min(2 * options.shard_bytes, options.max_pending_bytes // 4))
        if self.mirror is not None:
            self.mirror.start()
        self.writer.inbox.further = partial(_take_in_sessions, weakref.ref(self))
        if self._may_have_sessions():
            self.take_in_sessions()  # before rollouts are evicted whose sessions are not recorded as over
            self.retain()

    def _add_late(self, trajectories: list[AnyTrajectory], late: int) -> list[int]:
        return add_with_values(trajectories, self._add_recorded, self)

    def _add(self, runs: Sequence[FlatTrajectories], uuids: bytes | None, count: int) -> list[int]:
        """Add trajectories; on a full queue this waits.

        A list that needs more memory than a shard is added in pieces, each atomically.

        Raises:
            StoreWriteError: an earlier write failed.
            PartlyAddedError: adding failed after the first pieces; has their ids.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        ids: list[int] = []
        for piece, nbytes in cut(runs, self._shard_bytes):
            given = None if uuids is None else uuids[16 * len(ids) : 16 * (len(ids) + sum(map(len, piece)))]
            try:
                ids += self._submit(piece, Batch(nbytes), not ids, given)
            except Exception as error:  # for any error the caller needs the ids
                if not ids:
                    raise
                raise PartlyAddedError(
                    f"{error or repr(error)}; the first {len(ids)} of {trajectories(count)} were added before, "
                    "this error's ids are theirs; add the others again",
                    ids,
                ) from error
        return ids

    def _submit(self, runs: Sequence[FlatTrajectories], batch: Batch, first: bool, given: bytes | None) -> list[int]:
        queue = self.writer.queue
        ids: list[int] = []
        copies: list[Copied] = []
        queue.check_process()  # a forked child cannot undo either: the lock may be held for ever
        try:
            queue.reserve(batch, first=first)
            copies = self._copied(runs, given)
            with self.lock:
                ids, uuids = queue.take_ids(sum(map(len, runs)))
                queue.submit(batch, copies, self._view.contents.add(copies, ids, given or uuids, pending=True))
                self.counter = ids[-1] + 1
        except BaseException:
            uninterrupted(partial(self._take_back, batch, copies, ids))
            raise
        return ids

    def _take_back(self, batch: Batch, copies: Sequence[Copied], ids: Sequence[int]) -> None:
        """Undo an interrupted addition; a batch that is queued already stays."""
        if self.writer.queue.withdraw(batch):
            self._view.contents.retract(copies, ids)

    def go_on(self, counter: int, first: int, stride: int) -> None:
        self.counter = counter
        self._view.own_first = self.writer.queue.reserve_ids(first, stride)

    def share_ids(self, rank: int, ranks: int, *, at_least: int = 0) -> int:
        with self.lock:
            return self.writer.queue.reserve_ids(at_least + (rank - at_least) % ranks, ranks)

    def _retain(self) -> None:
        self.writer.retain()

    def evict(self, ids: IntArray) -> None:
        own = self._view.are_own(ids)
        mine = ids[own]
        if len(mine):
            waiting = self._view.contents.pending_in(mine)
            self.take_in_sessions()  # after a crash, evicted rollouts would come back of sessions that are not over
            # First those that need no space: on a full disk, pending writes are possible only afterwards.
            if len(waiting) < len(mine):
                uninterrupted(partial(self.writer.log.evict, mine[~np.isin(mine, waiting)]))
            if len(waiting):
                with self.lock:  # as in _flush_pending
                    pass
                self.flush()
                uninterrupted(partial(self.writer.log.evict, waiting))
            self.writer.rewriter.note()
        self._view.forget(ids[~own])

    @property
    def committed(self) -> int:
        return self.writer.queue.committed

    def wait(self, ids: IntArray, timeout: float | None) -> bool:
        if not len(ids):
            return False
        if (lowest := int(ids.min())) < 0:
            raise TrajectoryUnavailableError(f"{self.writer.log.directory.url}: no trajectory has the id {lowest}")
        return self.writer.queue.wait(int(ids.max()), timeout)

    def flush(self, timeout: float | None = None) -> None:
        self.take_in_sessions()
        self.writer.flush(timeout)
        self.take_in_sessions()

    @property
    def sessions(self) -> BufferSessions:
        with self.lock:
            if self._sessions is None:
                self._sessions = BufferSessions(self, self.writer.log.catalog.store_id)
            return self._sessions

    def take_in_sessions(self) -> None:
        """Add the rollouts of finished sessions of other processes, if there are any."""
        if self._may_have_sessions():
            self.sessions.look()

    def warn_of_open(self, what: str) -> None:
        if self._may_have_sessions():
            warn_of_open(self.writer.directory.url, what)

    def _may_have_sessions(self) -> bool:
        directory = self.writer.directory
        return isinstance(directory, LocalDirectory) and (
            self._sessions is not None or directory.root.has_folder(CALLS_FOLDER)
        )

    @property
    def abandoned_after(self) -> float | None:
        """Seconds without a call after which the retention drops an open session."""
        return self._view.retention.abandoned_after

    def keep_from(self, first: int) -> None:
        """Exempt the trajectories from this id on from the retention; ``ID_LIMIT`` ends it."""
        self._view.kept_from = first

    def ids_of(self, uuids: bytes) -> list[int]:
        """Return the ids of the leading trajectories of these UUIDs, 16 bytes each, in the store or a snapshot."""
        ids: list[int] = []
        with self.writer.log.standing_still() as catalog:
            for uuid in np.frombuffer(uuids, "V16"):
                found = [index["trajectory_id"][index["uuid"] == uuid] for index in (catalog.index, catalog.pinned)]
                if not any(map(len, found)):
                    break
                ids.append(int(np.concatenate(found)[0]))
        return ids

    def take_in_values(self) -> None:
        with written(": late values could not be taken in"):
            uninterrupted(self.writer.inbox.take_in)

    def compact(self, *, compress: bool = False) -> int:
        self.writer.compact(compress=compress)
        return len(self.writer.rewriter.damaged)

    def annotate(self, update: LateValues, rows: Rows) -> None:
        others = update.ids[~self._view.are_own(update.ids)]
        if len(others):
            raise StoreError(
                f"annotate: trajectories {ids_in_words(others)} were loaded from elsewhere; give the path of that store"
            )
        self._flush_pending(update.ids)
        uninterrupted(partial(self.writer.annotate, update, rows))

    def _flush_pending(self, ids: Sequence[int] | IntArray) -> None:
        """Flush if one of these is not committed yet."""
        if len(self._view.contents.pending_in(ids)):
            with self.lock:  # another thread's addition is shown, and a moment later queued, under this lock
                pass
            self.writer.flush()

    def check_values(self, ids: Sequence[int], update: LateValues) -> None:
        self._flush_pending(ids)
        with self.writer.log.standing_still() as catalog:
            catalog.check_known(ids)
            catalog.notes.check(update)

    def history(self, trajectory_id: int) -> list[Note]:
        if len(self._view.contents.pending_in([trajectory_id])):  # annotate flushes first
            return []
        with self.writer.log.standing_still() as catalog:
            catalog.check_known([trajectory_id])
            return catalog.notes.history(trajectory_id)

    def commits(self) -> tuple[str, int, int]:
        with self.writer.log.standing_still() as catalog:
            return catalog.store_id, catalog.next_id, catalog.visit

    def keeping_files(self) -> AbstractContextManager[object]:
        return self.writer.log.keeping_files()

    def figures(self) -> dict[str, float]:
        queue, log = self.writer.queue, self.writer.log
        live, files = log.space()
        figures: dict[str, float] = {
            "pending_bytes": queue.pending_bytes,
            "write_retries": queue.retries,
            "set_aside": queue.set_aside,
            "live_bytes": live,
            "shard_bytes": files,
            "held_bytes": log.garbage.held_bytes,
        }
        if self.mirror is not None:
            state = self.mirror.state
            figures |= {
                "mirrored": state.newest_id,
                "mirror_behind": self.mirror.behind,
                "mirror_failures": state.failures,
            }
        return figures

    def close(self) -> None:
        try:
            if self._sessions is not None and not self.writer.closed:
                with suppress(StoreError):  # raised again when the writer is closed
                    self.flush()
                with suppress(OSError):  # only journals that nothing needs stay
                    self._sessions.close()
            if self.mirror is not None:
                if not self.mirror.closed:
                    self.warn_of_open(f"the mirror {self.mirror.state.url} lacks")
                _close_mirror(self.mirror, self.writer)
        finally:
            self._close_writer()

    def _close_writer(self) -> None:
        try:
            self.writer.close()
        finally:
            if self.writer.closed:  # else interrupted: it is closed in the background, or at exit
                self._finalizer.detach()
                forget(self.writer)


def _call_on_commit(owner: weakref.ref[StoreSink], ids: Sequence[int]) -> None:
    """Call the user's commit callback, holding no lock; it may refer to the buffer, so only the buffer keeps it."""
    sink = owner()
    call = None if sink is None else sink._on_commit
    del sink
    if call is not None:
        call(ids)


def _take_in_sessions(owner: weakref.ref[StoreSink]) -> None:
    """Take in finished sessions, in the thread of the inbox."""
    sink = owner()
    if sink is not None:
        sink.take_in_sessions()


def _tell_format(directory: Directory, before: str, now: str) -> None:
    """Warn of a store with shards of another format than new ones."""
    if before != now:
        logger.warning(
            "%s: its newest shard has format %s, and new ones get %s; both can be read. Pass "
            "trajectory_format=%r to keep the format",
            directory.url,
            before,
            now,
            before,
        )


def _close_mirror(mirror: StoreMirror, writer: StoreWriter) -> None:
    """Copy everything to the mirror, within its time limit; before the writer replaces the log by an index."""
    if not mirror.closed:
        with suppress(StoreError):  # raised again when the writer is closed
            writer.flush()
        mirror.close()
    forget(mirror)


def _close_quietly(mirror: StoreMirror | None, writer: StoreWriter) -> None:
    """Close an abandoned buffer; errors can only be logged."""
    if writer.is_own_thread() or (mirror is not None and mirror.is_own_thread()):
        # This thread held the last reference, perhaps in a commit callback, and cannot wait for itself.
        threading.Thread(target=_close_quietly, args=(mirror, writer), name="trajstore-close").start()
        return
    if mirror is not None:
        _close_mirror(mirror, writer)
    try:
        writer.close()
    except StoreError as error:
        logger.error("%s", error)
    forget(writer)
