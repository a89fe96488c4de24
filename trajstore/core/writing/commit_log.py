"""The durable account of a store: every change to its log, index, pins and files passes through here.

Only for the holder of the writer's lock. What a crash leaves at each point is written in docs/design/store.md.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from trajstore.core.base import locks
from trajstore.core.base.clock import microseconds
from trajstore.core.columns.schema import Extent
from trajstore.core.files.base import Directory
from trajstore.core.formats.base import ShardManifest
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.given import Said
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.log_records import ranges_of
from trajstore.core.store.notes import Notes
from trajstore.core.store.saved_points import pin_name
from trajstore.core.writing.commits import (
    AddLines,
    CommitListener,
    add_lines,
    annotate_line,
    evict_line,
    rewrite_line,
)
from trajstore.core.writing.groups import ShardDraft
from trajstore.core.writing.log_end import LogEnd, TakeIn
from trajstore.core.writing.opening import open_store
from trajstore.core.writing.snapshots import Snapshots
from trajstore.errors import (
    StoreClosedError,
    StoreLockedError,
    StoreWriteError,
    TrajstoreError,
    WriterFencedError,
    written,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_RECORDS = 20_000
"""Records of the log after which the index is written whole, or a sixteenth of the entries if that is more."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a thread may do while no other one changes the store, see :meth:`CommitLog.turn`.

    Attributes:
        commit: see :meth:`CommitLog._commit`.
        keep_house: see :meth:`CommitLog.keep_house`.
    """

    commit: Callable[[Sequence[Sequence[ShardDraft]]], None]
    keep_house: Callable[[], None]


class CommitLog:
    """Appends commits and evictions to the log, and writes the index whole now and then.

    Methods take its lock themselves; the few that expect it to be held say within which of them to call.

    Args:
        directory: where; created if absent, continued if it holds a store.
        format_name: what ``metadata.json`` says of the format of new shards.
        snapshot_bytes: a snapshot is due when the log has grown by this, or by twice the last snapshot if that is more.
        listener: told of each commit and eviction.

    Raises:
        StoreWriteError: the directory cannot be written.
        CorruptStoreError, UnsupportedVersionError: what is there cannot be continued.
    """

    def __init__(self, directory: Directory, format_name: str, snapshot_bytes: int, listener: CommitListener) -> None:
        self.directory = directory
        self._lock = locks.lock("CommitLog._lock")
        self.must_keep_house = False
        """Whether ``keep_house`` is to be called: half a record may stand in the log, or the last call has failed."""
        self._snapshot_bytes = snapshot_bytes
        self._listener = listener
        self.evicted_bytes = 0
        """Bytes of all trajectories that were evicted through this log or let go by a pin."""
        self._out_of_step: Exception | None = None
        self._pid = os.getpid()
        self._closed = False
        self._taken_in: set[int] = set()
        """First shards of commits in the catalog. Those that are asked for again had been told to have failed."""
        self._snapshots = Snapshots(directory, format_name, listener)
        self.catalog, self.garbage, segment = open_store(directory, self._snapshots)
        self._end = LogEnd(directory, self.catalog, segment)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock for a change that the writer's user asked for."""
        check_process(self._pid, self.directory.url)  # first: in a forked child the lock may never come free
        with self._lock:
            self.check_open()
            yield

    @contextmanager
    def standing_still(self) -> Iterator[Catalog]:
        """Let nothing be committed, evicted or deleted by others while the caller is at the catalog."""
        with self._lock:
            yield self.catalog

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Let one thread choose what it commits, commit it and tell of it, before another one does the same."""
        with self._lock:
            yield Turn(self._commit, self._keep_house)

    def check_open(self) -> None:
        """Refuse a closed writer; within :meth:`changing`, or while it is chosen what to read.

        Raises:
            StoreClosedError: it was closed.
        """
        if self._closed:
            raise StoreClosedError(f"{self.directory.url}: the writer was closed")

    def close(self) -> None:
        """Refuse every further change from outside."""
        with self._lock:
            self._closed = True

    # -- commits ----------------------------------------------------------------------------------

    def _commit(self, commits: Sequence[Sequence[ShardDraft]]) -> None:
        """Append commits to the log in one go, take them into the catalog, and tell the listener.

        Whatever can fail for the shards' own sake is done before the append; what is durable never fails afterwards.

        Args:
            commits: the shards of each, one or more; a commit is one record, and so there whole or not at all.

        Raises:
            StoreWriteError: the log could not be written; nothing of it happened.
        """
        if not commits:
            return
        catalog = self.catalog

        def make() -> tuple[bytes, TakeIn]:
            left = [shards for shards in commits if shards[0].number not in self._taken_in]
            lines = add_lines(catalog, left, microseconds())
            if lines.entries:
                self._listener.make_room(catalog.index, np.concatenate([e["trajectory_id"] for e in lines.entries]))
            return lines.data, partial(self._take_in, left, lines)

        self._append(make)
        self._taken_in.difference_update(shards[0].number for shards in commits)

    def _take_in(self, commits: Sequence[Sequence[ShardDraft]], lines: AddLines) -> None:
        catalog = self.catalog
        with self._durable():
            for shards, entries in zip(commits, lines.entries, strict=True):
                catalog.add([(shard.number, shard.manifest) for shard in shards], entries)
                catalog.generation += 1
        self._taken_in.update(shards[0].number for shards in commits)
        self._tell(lambda: self._listener.committed(lines.told), adds=True)

    @contextmanager
    def _durable(self) -> Iterator[None]:
        """Take what is in the log into the catalog. If that fails, nothing more may be written on top of it."""
        try:
            yield
        except Exception as error:  # a bug, or no memory left; the disk is right and stays so
            logger.exception("%s: what was committed could not be taken in", self.directory.url)
            self._out_of_step = error

    def _check_in_step(self) -> None:
        if self._out_of_step is not None:
            raise StoreWriteError(
                f"{self.directory.url}: holds more than this writer knows ({self._out_of_step!r}); open it again"
            ) from self._out_of_step

    def _tell(self, call: Callable[[], None], *, adds: bool = False) -> None:
        """Tell the listener; what was only added can be read from memory all the same, if that fails."""
        try:
            call()
        except Exception as error:  # what it was told is durable all the same
            logger.exception("%s: a change that is on disk could not be shown", self.directory.url)
            if not adds:
                self._listener.out_of_step(error)

    def keep_house(self) -> None:
        """Evict what retention wants evicted, and write the index if the log has grown much.

        Raises:
            StoreWriteError: it could not be written; nothing of it happened.
        """
        with self.turn() as turn:
            turn.keep_house()

    def _keep_house(self) -> None:
        """Do what :meth:`keep_house` says, with the lock held.

        Raises:
            StoreWriteError: it could not be written; nothing of it happened.
        """
        self.must_keep_house = True
        with written(": a record that was not committed could not be cut off"):
            self.directory.clear_failed_appends()
        self._end.settle()
        self._evict(self._listener.to_evict())
        catalog = self.catalog
        records = catalog.generation - catalog.snapshot_generation
        long = records > max(_MAX_RECORDS, len(catalog.index) // 16)  # reading a record costs more than its bytes
        if long or catalog.log_bytes > max(self._snapshot_bytes, 2 * catalog.snapshot_bytes):
            self._begin_segment()
        self.must_keep_house = False

    def _append(self, make: Callable[[], tuple[bytes, TakeIn]]) -> None:
        """Append lines to the log and take them in, see :meth:`LogEnd.append`."""

        def checked() -> tuple[bytes, TakeIn]:
            self._check_in_step()
            return make()

        try:
            self._end.append(checked)
        except StoreWriteError:
            self.must_keep_house = True
            raise

    # -- eviction, moving, pins -------------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Take committed trajectories out of the store, durably; their files go when nobody needs them.

        Raises:
            StoreWriteError: the log could not be written; nothing was evicted.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self.changing():
            self._evict(ids)

    def _evict(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        catalog = self.catalog
        ranges = ranges_of(sorted(ids))

        def take_in() -> None:
            with self._durable():
                self.evicted_bytes += catalog.evict(np.array(ranges, np.int64))
                catalog.generation += 1
            self._tell(lambda: self._listener.evicted(ids))
            self.garbage.collect(catalog)

        self._append(lambda: (evict_line(catalog, ranges), take_in))

    def annotate(self, said: Said) -> None:
        """Give trajectories values, durably.

        Raises:
            ConfigurationError: they contradict those that are there.
            TrajectoryUnavailableError: an id is not in the store; nothing was given to any.
            StoreWriteError: the log could not be written; nothing was given.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self.changing():
            catalog = self.catalog
            catalog.notes.check(said)
            catalog.check_known(said.ids)

            def take_in() -> None:
                with self._durable():
                    noted = catalog.annotate(said, catalog.generation + 1)
                    catalog.generation += 1
                    self._tell(lambda: self._listener.noted(noted))
                if catalog.notes.has_rows:
                    self.garbage.collect(catalog)  # earlier ones may be needed by nobody now

            self._append(lambda: (annotate_line(catalog, said), take_in))

    def unknown(self, ids: Sequence[int]) -> set[int]:
        """Return the ids that no trajectory of the store has by now."""
        with self._lock:
            return self.catalog.unknown(ids)

    def forget_sources(self, stay: Collection[str]) -> None:
        """Forget the names of files of the inbox that are deleted, durably, which are all but these."""
        with self._lock:
            self.catalog.notes.sources.intersection_update(stay)

    def move(self, number: int, manifest: ShardManifest, ids: Sequence[int], extents: Sequence[Extent]) -> None:
        """Record a shard, whose files are durable, that holds trajectories of others; these are read from it now.

        Args:
            number: of the shard.
            manifest: of the shard.
            ids: of its trajectories, ascending; some may have been evicted since they were copied.
            extents: of each.

        Raises:
            StoreWriteError: the log could not be written; nothing was moved.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self.changing():
            catalog = self.catalog

            def take_in() -> None:
                with self._durable():
                    moved = catalog.move(number, manifest, np.array(ids, np.int64), extents)
                    catalog.generation += 1
                    self._tell(lambda: self._listener.moved(moved))

            self._append(lambda: (rewrite_line(catalog, number, manifest, ids, extents), take_in))

    @contextmanager
    def recording(self, manifest: ShardManifest) -> Iterator[None]:
        """Record a shard within, whose files go if that fails: no commit names them then."""
        try:
            yield
        except WriterFencedError:  # the store is another writer's, which clears up
            raise
        except TrajstoreError:
            if not self.must_keep_house:  # else half a record may stand in the log, and name them
                self.directory.remove([file.name for file in manifest.files])
            raise

    def space(self) -> tuple[int, int]:
        """Return bytes of the live trajectories, and bytes of the files that they and the pins need."""
        with self._lock:
            catalog = self.catalog
            return int(catalog.index["nbytes"].sum()), int(catalog.shards.nbytes()[catalog.needed_shards()].sum())

    def collect_garbage(self) -> None:
        """Delete what nobody needs any more."""
        with self._lock:
            self.garbage.collect(self.catalog)

    def release_pins(self, names: Sequence[str]) -> None:
        """Let go of pins; evicted trajectories that only they named are deleted. Within :meth:`changing`."""
        # Durably, before any shard goes: power loss must not bring back a pin without the files that it names.
        self.directory.remove([pin_name(name) for name in names], durable=True)
        before = int(self.catalog.pinned["nbytes"].sum())
        self.catalog.load_pins()
        self.evicted_bytes += before - int(self.catalog.pinned["nbytes"].sum())
        self.garbage.collect(self.catalog)

    def replace(self, index: TrajectoryIndex, pinned: TrajectoryIndex, notes: Notes, line: tuple[str, ...]) -> None:
        """Commit other entries, late values and saved points than there are; within :meth:`changing`.

        The index is written whole. It is the one commit that is not in the log: whoever follows finds that the log does
        not go on, and loads again.

        Raises:
            StoreWriteError: it could not be written. Nothing more can be, until the store is opened again: on disk is
                the state before or the one after.
        """
        self._check_in_step()
        if self._end.settle():
            raise StoreWriteError(f"{self.directory.url}: an earlier change was committed after all; try again")
        changed = copy.copy(self.catalog)
        changed.index, changed.pinned, changed.notes = index, pinned, notes
        changed.generation, changed.visit, changed.line = self.catalog.generation + 1, self.catalog.visit + 1, line
        notes.lay_over(index)
        pinned.forget_notes()
        try:
            self._write_snapshot(changed)
        except BaseException as error:
            self._out_of_step = error if isinstance(error, Exception) else StoreWriteError("interrupted")
            raise
        self.catalog.__dict__.update(changed.__dict__)
        self._end.begin_segment()
        self._tell(self._listener.replaced)

    @contextmanager
    def keeping_files(self) -> Iterator[None]:
        """Delete no shard meanwhile, whatever is evicted; the end of this makes up for it."""
        with self.keeping_files_for(lambda: True):
            yield

    @contextmanager
    def keeping_files_for(self, choose: Callable[[], T | None]) -> Iterator[T | None]:
        """Choose what to read, and delete no shard meanwhile if that is anything.

        Args:
            choose: called while nothing can be committed or evicted; None where there is nothing to read.
        """
        with self._lock:
            chosen = choose()
            held = chosen is not None
            self.garbage.holds += held
        try:
            yield chosen
        finally:
            if held:
                with self._lock:
                    self.garbage.holds -= 1
                    if self.garbage.put_off and not self._closed:
                        self.garbage.collect(self.catalog)

    # -- snapshots --------------------------------------------------------------------------------

    def snapshot(self) -> None:
        """Write the index whole and begin a new log segment, if anything was committed since the last time.

        Raises:
            StoreWriteError: it could not be written; the log still has everything.
        """
        with self._lock:
            if self.catalog.generation > self.catalog.snapshot_generation:
                self._write_snapshot(self.catalog)
                self._end.begin_segment()

    def _begin_segment(self) -> None:
        """Write the index whole, and keep the segment before the new one: a reader that follows is often in it."""
        earlier = self.catalog.snapshot_generation if self.directory.can_append else None
        self._write_snapshot(self.catalog, earlier)
        self._end.begin_segment()
        if self.directory.can_append:
            with suppress(
                OSError
            ):  # then it comes with the next commit; whoever opens reads the earlier one until then
                self.directory.append(self._end.segment, b"")

    def _write_snapshot(self, catalog: Catalog, keep_after: int | None = None) -> None:
        self._check_in_step()
        self._snapshots.write(catalog, self.garbage, keep_after)

    @property
    def renewal_due(self) -> bool:
        """Whether ``metadata.json`` should be renewed."""
        return self._snapshots.renewal_due(self.catalog)

    def renew_metadata(self) -> None:
        """Let ``metadata.json`` tell of what is committed by now, at most once a second; it is for people and tools.

        Not part of the durable order: what is missed now comes later.
        """
        if not self.renewal_due or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closed and self._out_of_step is None and not self._snapshots.renew(self.catalog):
                self._begin_segment()  # which keeps the files of RLinf
        except (OSError, StoreLockedError) as error:
            logger.warning("%s: metadata.json was not renewed: %s", self.directory.url, error)
        finally:
            self._lock.release()


def check_process(pid: int, url: str) -> None:
    """Refuse to go on in a forked child.

    Raises:
        StoreClosedError: this is not the process ``pid``.
    """
    if os.getpid() != pid:
        raise StoreClosedError(f"{url}: this writer belongs to the parent process; open a reader here")
