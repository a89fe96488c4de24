"""The durable state of a store: all changes to its log, index, pins and files.

Only for the holder of the writer's lock. docs/design/store.md describes the state after a crash at each point.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from trajstore._core.base import locks
from trajstore._core.base.clock import microseconds
from trajstore._core.base.types import IntArray
from trajstore._core.files.base import FULL, Directory
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.committed import Change, Evicted
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.log_records import id_ranges, segment_name
from trajstore._core.store.rollback import Plan
from trajstore._core.store.saved_points import pin_name
from trajstore._core.writing.commits import CommitListener, add_lines, annotate_line, evict_line, rewrite_line
from trajstore._core.writing.fencing import step_over
from trajstore._core.writing.groups import ShardDraft
from trajstore._core.writing.maintenance import Snapshots
from trajstore._core.writing.opening import open_store
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreClosedError,
    StoreLockedError,
    StoreNotFoundError,
    StoreWriteError,
    TrajstoreError,
    WriterFencedError,
    written,
)

logger = logging.getLogger(__name__)

LOG_BYTES = 16 << 20
"""The index is written whole when the log has grown by this, or by twice the index's size if that is more."""

_MAX_RECORDS = 20_000
"""The index is written whole after this many log records, or after a sixteenth of the entries if that is more."""

_MOST_SEGMENTS = 64


def too_many_segments(segments: int, snapshot_bytes: int) -> bool:
    """Return whether the index should be written whole, where each commit is a segment: an object to list and to read.

    They may be 64, or one for each megabyte of the index if that is more.
    """
    return segments > max(_MOST_SEGMENTS, snapshot_bytes >> 20)


Apply = Callable[[], Sequence[Change]]
"""Applies logged lines to the catalog; returns the changes, which the listener receives."""


class CommitLog:
    """Appends commits and evictions to the log, and periodically writes the index whole.

    Methods take its lock themselves; those that expect it to be held name the context manager to call them in.

    Args:
        directory: created if absent, continued if it holds a store.
        metadata: returns further values of ``metadata.json``.
        listener: receives each commit and eviction.

    Raises:
        StoreWriteError: the directory cannot be written.
        CorruptStoreError, UnsupportedVersionError: the existing store cannot be continued.
    """

    def __init__(
        self, directory: Directory, metadata: Callable[[], Mapping[str, Any]], listener: CommitListener | None = None
    ) -> None:
        self.directory = directory
        self._lock = locks.rlock("CommitLog._lock")  # reentrant for those whom :meth:`asking` lets read
        self._asking: int | None = None
        self.must_keep_house = False
        """Whether ``keep_house`` must be called: the log may end in half a record, or the last call failed."""
        self._listener = listener or CommitListener()
        self.evicted_bytes = 0
        """Bytes of all trajectories evicted or released from a pin by this log."""
        self._out_of_step: Exception | None = None
        self._pid = os.getpid()
        self._closed = False
        self._taken_in: set[int] = set()
        """First shard numbers of commits in the catalog. A commit requested again was earlier reported as failed."""
        self._snapshots = Snapshots(directory, metadata)
        self.catalog, self.garbage, self._segment = open_store(directory, self._snapshots)
        self._segments = 0
        """Log segments since the index was written whole, where each commit is one."""
        self._unanswered: list[tuple[bytes, Apply]] = []

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock for a change by the writer's user.

        Raises:
            WriterFencedError: another writer took the store over, which may look like corruption.
        """
        check_process(self._pid, self.directory.url)  # first: in a forked child the lock may stay held forever
        self.check_not_asking()
        with self._lock:
            self.check_open()
            try:
                yield
            except (StoreNotFoundError, CorruptStoreError):
                self.directory.confirm()
                raise

    @contextmanager
    def standing_still(self) -> Iterator[Catalog]:
        """Yield the catalog while no other thread commits, evicts or deletes."""
        with self._lock:
            yield self.catalog

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let users' code, which this thread runs with the lock, read the store and refuse its changes."""
        self._asking = threading.get_ident()
        try:
            yield
        finally:
            self._asking = None

    def check_not_asking(self) -> None:
        """Raise :class:`ConfigurationError` within :meth:`asking`, instead of waiting for ever."""
        if self._asking == threading.get_ident():
            raise ConfigurationError(
                f"{self.directory.url}: a state_dict() that is called to save a point may read the store, but not "
                "change it or wait for it; do so before points.save"
            )

    def check_open(self) -> None:
        """Raise if the writer is closed; within :meth:`changing`, or while selecting files to read.

        Raises:
            StoreClosedError: it was closed.
        """
        if self._closed:
            raise StoreClosedError(f"{self.directory.url}: the writer was closed")

    def close(self) -> None:
        """Refuse all further changes by users."""
        with self._lock:
            self._closed = True

    # -- appending --------------------------------------------------------------------------------

    def _append(self, make: Callable[[], tuple[bytes, Apply]], retry: str = "flush()") -> None:
        """Append lines to the log, apply them to the catalog and notify the listener; with the lock held.

        In an object store a response may be lost: lines whose append was reported as failed may exist, or appear
        late. A segment can be created only once, so nothing else can take its place: before the next commit, an
        existing segment is read and applied.

        Args:
            make: returns the lines for the generation that is next when it is called; no lines if all are written.
            retry: the user's call that tries again, for the message.

        Raises:
            StoreWriteError: the log could not be written.
        """
        try:
            while True:
                self._check_in_step()
                data, apply = make()
                if not data:
                    return
                try:
                    self.directory.append(self._segment, data)
                    break
                except WriterFencedError:
                    raise
                except OSError as error:
                    if isinstance(error, FileExistsError) and (self._settle() or self._step_over()):
                        continue
                    if not self.directory.can_append:  # elsewhere a failed append leaves no data
                        self._unanswered.append((data, apply))
                    remedy = "free space and" if error.errno in FULL else "then"
                    raise StoreWriteError(
                        f"{error}: the commit log could not be written; {remedy} {retry} again"
                    ) from error
        except StoreWriteError:
            self.must_keep_house = True
            raise
        self._unanswered.clear()
        self._apply(data, apply)

    def _apply(self, data: bytes, apply: Apply) -> None:
        """Apply durable lines; if that fails, all further writes are refused, and if showing fails, all reads."""
        catalog = self.catalog
        catalog.log_bytes += len(data)
        if not self.directory.can_append:
            self._segment = segment_name(catalog.generation + 1 + data.count(b"\n"))
            self._segments += 1
        try:
            changes = apply()
        except Exception as error:  # a bug, or out of memory; the files on disk are correct
            logger.exception("%s: committed changes could not be applied", self.directory.url)
            self._out_of_step = error
        else:
            self._show(partial(self._listener.changed, changes))

    def _show(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # the change is durable regardless
            logger.exception("%s: a change that is on disk could not be shown", self.directory.url)
            self._listener.missed(error)

    def _check_in_step(self) -> None:
        if self._out_of_step is not None:
            raise StoreWriteError(
                f"{self.directory.url}: holds more than this writer knows ({self._out_of_step!r}); open it again"
            ) from self._out_of_step

    def _settle(self) -> bool:
        """Apply lines of a failed append that were written after all; return whether there were any.

        Raises:
            StoreWriteError: the store cannot be read.
        """
        if not self._unanswered:
            return False
        try:
            content = self.directory.read(self._segment)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreWriteError(f"{error}: cannot be read, and may have been written; flush() again") from error
        for data, apply in self._unanswered:
            if data == content:
                self._unanswered.clear()
                logger.warning("%s/%s: is committed; its answer was lost", self.directory.url, self._segment)
                self._apply(data, apply)
                self.garbage.collect(self.catalog)
                return True
        return False

    def _step_over(self) -> bool:
        if not step_over(self.directory, self.catalog):
            return False
        self._segment = segment_name(self.catalog.generation + 1)
        return True

    # -- commits ----------------------------------------------------------------------------------

    def commit(self, commits: Sequence[Sequence[ShardDraft]]) -> None:
        """Append commits to the log in one write; within :meth:`standing_still`.

        All errors caused by the shards occur before the append; a durable commit never fails afterwards.

        Args:
            commits: the shards of each, one or more; a commit is one record, so it is atomic.

        Raises:
            StoreWriteError: the log could not be written; nothing was committed.
        """
        if commits:
            self._append(partial(self._addition, commits))
            if not self.directory.can_append:
                self.garbage.collect(self.catalog, soon=True)
            self._taken_in.difference_update(shards[0].number for shards in commits)

    def _addition(self, commits: Sequence[Sequence[ShardDraft]]) -> tuple[bytes, Apply]:
        catalog, listener = self.catalog, self._listener
        commits = [shards for shards in commits if shards[0].number not in self._taken_in]
        lines, entries = add_lines(catalog, commits, microseconds())
        if entries:
            listener.make_room(catalog.index, np.concatenate([added.columns["trajectory_id"] for added in entries]))
        going: list[Evicted] = []
        if entries and not self.directory.can_append:  # each append is a request: retention takes none of its own
            newest = int(entries[-1].columns["trajectory_id"][-1])
            if len(ids := listener.to_evict(newest)):
                going = [_evicted(ids)]
                lines += evict_line(catalog.generation + len(entries) + 1, going[0].ranges)

        def apply() -> Sequence[Change]:
            for shards, added in zip(commits, entries, strict=True):
                generation = catalog.generation + 1
                catalog.add([(shard.number, shard.manifest, generation) for shard in shards], added)
                catalog.generation = generation
                self._taken_in.add(shards[0].number)
            self._apply_evictions(going)
            return [*entries, *going]

        return lines, apply

    def _apply_evictions(self, evictions: Sequence[Evicted]) -> None:
        for evicted in evictions:
            self.evicted_bytes += self.catalog.evict(evicted.ranges)
            self.catalog.generation += 1

    def keep_house(self) -> None:
        """Apply retention, and write the index if the log has grown enough.

        Raises:
            StoreWriteError: writing failed; nothing changed.
        """
        with self._lock:
            self.keep_house_now()

    def keep_house_now(self) -> None:
        """Do as :meth:`keep_house`, within :meth:`standing_still`."""
        self.must_keep_house = True
        with written(": a record that was not committed could not be cut off"):
            self.directory.clear_failed_appends()
        if self._unanswered:
            self._settle()
        self._evict(self._listener.to_evict())
        catalog = self.catalog
        records = catalog.generation - catalog.snapshot_generation
        long = records > max(_MAX_RECORDS, len(catalog.index) // 16)  # reading a record costs more than its bytes
        long = long or catalog.log_bytes > max(LOG_BYTES, 2 * catalog.snapshot_bytes)
        if long or (self._segments and too_many_segments(self._segments, catalog.snapshot_bytes)):
            self._begin_segment()
        self.must_keep_house = False

    # -- eviction, moving, pins -------------------------------------------------------------------

    def evict(self, ids: IntArray) -> None:
        """Evict committed trajectories durably; their files are deleted once unneeded.

        Raises:
            StoreWriteError: the log could not be written; nothing was evicted.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self.changing():
            self._evict(ids, "evict()")

    def _evict(self, ids: IntArray, retry: str = "flush()") -> None:
        if not len(ids):
            return
        catalog, evicted = self.catalog, _evicted(ids)

        def apply() -> Sequence[Change]:
            self._apply_evictions([evicted])
            return [evicted]

        self._append(lambda: (evict_line(catalog.generation + 1, evicted.ranges), apply), retry)
        self.garbage.collect(catalog)

    def annotate(self, update: LateValues) -> None:
        """Add late values to trajectories, durably.

        Raises:
            ConfigurationError: they contradict existing values.
            TrajectoryUnavailableError: an id is not in the store; no value was added.
            StoreWriteError: the log could not be written; no value was added.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self.changing():
            self._append(partial(self._annotation, update), "annotate()")
            if self.catalog.notes.has_rows:
                self.garbage.collect(self.catalog)  # shards of replaced values may be unneeded now

    def _annotation(self, update: LateValues) -> tuple[bytes, Apply]:
        catalog = self.catalog
        catalog.notes.check(update)  # here: an earlier change that was reported as failed may have been applied
        catalog.check_known(update.ids)

        def apply() -> Sequence[Change]:
            noted = catalog.annotate(update, catalog.generation + 1)
            catalog.generation += 1
            return [noted]

        return annotate_line(catalog, update), apply

    def unknown(self, ids: IntArray) -> set[int]:
        """Return the ids without a trajectory in the store."""
        with self._lock:
            return self.catalog.unknown(ids)

    def forget_sources(self, stay: Collection[str]) -> None:
        """Keep only these names of inbox files; the others were durably deleted."""
        with self._lock:
            self.catalog.notes.sources.intersection_update(stay)

    def move(self, number: int, manifest: ShardManifest, ids: IntArray, extents: IntArray) -> int:
        """Record a durable shard with trajectories of other shards, read from it from now on; return its row.

        Args:
            number: of the shard.
            manifest: of the shard.
            ids: of its trajectories, ascending; some may have been evicted since they were copied.
            extents: of each, ``[n, 4]``.

        Raises:
            StoreWriteError: the log could not be written; nothing was moved.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self.changing():
            catalog = self.catalog

            def apply() -> Sequence[Change]:
                moved = catalog.move(number, manifest, ids, extents)
                catalog.generation += 1
                return [moved]

            self._append(lambda: (rewrite_line(catalog, number, manifest, ids, extents), apply))
            return len(catalog.shards) - 1

    @contextmanager
    def recording(self, manifest: ShardManifest) -> Iterator[None]:
        """Delete a shard's files if recording it in this context fails: no commit names them."""
        try:
            yield
        except WriterFencedError:  # another writer owns the store and cleans up
            raise
        except TrajstoreError:
            if not self.must_keep_house:  # else the log may end in half a record that names them
                self.directory.remove([file.name for file in manifest.files])
            raise

    def space(self) -> tuple[int, int]:
        """Return the bytes of live trajectories, and of the files that live and pinned trajectories need."""
        with self._lock:
            catalog = self.catalog
            return int(catalog.index["nbytes"].sum()), int(catalog.shards.nbytes()[catalog.needed_shards()].sum())

    def collect_garbage(self) -> None:
        """Delete unneeded files."""
        with self._lock:
            self.garbage.collect(self.catalog)

    def release_pins(self, names: Sequence[str]) -> None:
        """Remove pins and delete evicted trajectories that only they named. Within :meth:`changing`."""
        # Durably, before any shard is deleted: power loss must not restore a pin whose files are gone.
        self.directory.remove([pin_name(name) for name in names], durable=True)
        before = int(self.catalog.pinned["nbytes"].sum())
        self.catalog.load_pins()
        self.evicted_bytes += before - int(self.catalog.pinned["nbytes"].sum())
        self.garbage.collect(self.catalog)

    def go_to(self, plan: Plan) -> None:
        """Commit going to a snapshot; within :meth:`changing`.

        The index is written whole. This is the only commit outside the log: followers see a gap in the log and reload.

        Raises:
            StoreWriteError: writing failed. All further writes are refused until the store is reopened; on disk is
                the state before or the one after.
        """
        self._check_in_step()
        if self._settle():
            raise StoreWriteError(f"{self.directory.url}: an earlier change was committed after all; try again")
        changed = copy.copy(self.catalog)
        plan.notes.sources.update(changed.notes.sources)
        changed.go_to(plan.to.ids, plan.notes, plan.line)
        try:
            self._write_snapshot(changed)
        except BaseException as error:
            self._out_of_step = error if isinstance(error, Exception) else StoreWriteError("interrupted")
            raise
        self.catalog.__dict__.update(changed.__dict__)
        self._segment = segment_name(self.catalog.generation + 1)
        self._show(self._listener.replaced)
        self.garbage.collect(self.catalog)  # only now: until it is shown, replaced contents are read

    @contextmanager
    def keeping_files(self) -> Iterator[None]:
        """Delete no shard in this context; deletions are made up for at its end."""
        with self._lock:
            self.garbage.holds += 1
        try:
            yield
        finally:
            with self._lock:
                self.garbage.holds -= 1
                if self.garbage.put_off and not self._closed:
                    self.garbage.collect(self.catalog)

    # -- snapshots --------------------------------------------------------------------------------

    def snapshot(self) -> None:
        """Write the index whole and begin a new log segment, if there are new commits.

        Raises:
            StoreWriteError: writing failed; the log still has everything.
        """
        with self._lock:
            if self.catalog.generation > self.catalog.snapshot_generation:
                self._write_snapshot(self.catalog)
                self._segment = segment_name(self.catalog.generation + 1)
                self.garbage.collect(self.catalog)

    def _begin_segment(self) -> None:
        """Write the index whole; keep the segments since the last one, which followers are often still reading."""
        self._write_snapshot(self.catalog, self.catalog.snapshot_generation)
        self.garbage.collect(self.catalog)
        self._segment = segment_name(self.catalog.generation + 1)
        if self.directory.can_append:
            try:
                self.directory.append(self._segment, b"")
            except OSError as error:
                logger.warning(
                    "%s: log segment %s could not be created, which the next commit does: %s",
                    self.directory.url,
                    self._segment,
                    error,
                )

    def _write_snapshot(self, catalog: Catalog, keep_after: int | None = None) -> None:
        self._check_in_step()
        self._snapshots.write(catalog, keep_after)
        self._segments = 0

    @property
    def renewal_due(self) -> bool:
        """Whether ``metadata.json`` should be renewed."""
        return self._snapshots.renewal_due(self.catalog)

    def renew_metadata(self) -> None:
        """Update ``metadata.json`` to the current commits, at most once a second; it is for people and tools.

        It is not part of the durable order: a skipped update is made later.
        """
        if not self.renewal_due or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closed and self._out_of_step is None and not self._snapshots.renew(self.catalog):
                self._begin_segment()  # this also keeps RLinf's files
        except (OSError, StoreLockedError) as error:
            logger.warning("%s: metadata.json was not renewed: %s", self.directory.url, error)
        finally:
            self._lock.release()


def _evicted(ids: IntArray) -> Evicted:
    return Evicted(id_ranges(np.sort(ids, kind="stable")))  # fast for ids that ascend, as they mostly do


def check_process(pid: int, url: str) -> None:
    """Raise in a forked child.

    Raises:
        StoreClosedError: this is not the process ``pid``.
    """
    if os.getpid() != pid:
        remedy = "open a reader here, or record to a directory per process: rank_0, rank_1, ..."
        raise StoreClosedError(f"{url}: this writer belongs to the parent process; {remedy}")
