"""The one writer of a directory: bounded queue, thread pool, commit order, receipts.

The way of a group: taken from the queue by a pool thread, encoded, published (files durable), then, in
the order of ids, recorded in the log (one append for all groups that are ready), then visible. What a
crash leaves at each point is written in docs/design/store.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from trajstore.catalog import PINS_FOLDER, Catalog
from trajstore.commits import LOG_FOLDER, encode_line, manifest_to_json, ranges_of, segment_name
from trajstore.errors import PendingFullError, StoreClosedError, StoreWriteError
from trajstore.formats.base import ShardManifest, TrajectoryFormat
from trajstore.index import columns_of
from trajstore.maintenance import check_unused, collect_garbage, remove_leftovers, remove_segments
from trajstore.manifest import manifest_of
from trajstore.pending import OwnedRecord
from trajstore.record import Record
from trajstore.shards import shard_name
from trajstore.storage import Directory

logger = logging.getLogger(__name__)

SNAPSHOT_AFTER_BYTES = 16 << 20
"""A snapshot is written when the log has grown by this, or by twice the last snapshot's size if that is more."""


@dataclass(frozen=True)
class WriterOptions:
    """How a writer uses threads and memory.

    Attributes:
        threads: pool threads that encode and write shards.
        max_pending_bytes: memory for trajectories that are not committed yet.
        on_full: ``"block"`` waits until there is room, ``"raise"`` raises :class:`PendingFullError`.
        shard_bytes: a shard is closed when it holds this many bytes.
        commit_interval: seconds that a trajectory may wait for others to share its shard; ``flush`` does not wait.
    """

    threads: int = 2
    max_pending_bytes: int = 256 << 20
    on_full: Literal["block", "raise"] = "block"
    shard_bytes: int = 16 << 20
    commit_interval: float = 0.05


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed shard, as told to the listener."""

    ids: tuple[int, ...]
    row: int
    columns: Mapping[str, Any]


class CommitListener(Protocol):
    """What a writer tells; called with the log's lock held, so it must not call the writer back."""

    def committed(self, commits: Sequence[Commit]) -> None:
        """These shards are durable."""

    def to_evict(self) -> Sequence[int]:
        """Return the ids that retention wants gone now."""

    def evicted(self, ids: Sequence[int]) -> None:
        """These trajectories are durably out of the store."""


@dataclass(slots=True)
class _Waiting:
    trajectory_id: int
    owned: OwnedRecord
    uuid: bytes
    since: float


@dataclass(slots=True)
class _Group:
    ticket: int
    shard: int
    items: list[_Waiting]
    manifest: ShardManifest | None = None
    flushes: int = 0
    """Calls of ``flush`` when this attempt began."""

    @property
    def nbytes(self) -> int:
        return sum(item.owned.nbytes for item in self.items)


@dataclass(slots=True)
class _State:
    """Everything that threads share; guarded by the writer's condition."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    retry: deque[_Group] = field(default_factory=deque)
    ready: dict[int, _Group] = field(default_factory=dict)
    pending_bytes: int = 0
    next_id: int = 0
    last_taken: int = -1
    next_ticket: int = 0
    commit_ticket: int = 0
    next_shard: int = 0
    flush_until: int = -1
    committed: int = -1
    closing: bool = False
    flushes: int = 0
    error: StoreWriteError | None = None


class StoreWriter:
    """Adds trajectories to a directory and evicts them. Safe to call from several threads.

    Args:
        directory: where to write; created if absent, continued if it holds a store.
        trajectory_format: how new shards are written.
        options: threads and memory.
        state: returns what else ``metadata.json`` shall say (seed, ...).
        listener: told by a pool thread of each commit and eviction, before ``flush`` learns of it.

    Raises:
        StoreLockedError: somebody else writes there.
        StoreWriteError: the directory cannot be written.
        CorruptStoreError, UnsupportedVersionError: what is there cannot be continued.
    """

    def __init__(
        self,
        directory: Directory,
        trajectory_format: TrajectoryFormat,
        options: WriterOptions,
        state: Callable[[], Mapping[str, Any]],
        listener: CommitListener,
    ) -> None:
        self.directory = directory
        self.options = options
        self._format = trajectory_format
        self._metadata = state
        self._listener = listener
        self._holds = 0
        try:
            self._lock = directory.lock_writer()
        except OSError as error:
            raise StoreWriteError(f"{error}: cannot be written; to read it use load_checkpoint") from error
        try:
            self.catalog = self._open()
        except BaseException:
            self._lock.release()
            raise
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._log_lock = threading.Lock()
        self._state = _State(next_id=self.catalog.next_id, next_shard=self.catalog.next_shard)
        self._state.committed = self.catalog.next_id - 1
        self._id_stride = 1
        self._unsettled = False  # whether half a record may stand in the log, or housekeeping failed
        self._segment = segment_name(self.catalog.generation + 1)
        self._told_schemas = set(range(len(self.catalog.shards.schemas)))
        self._threads = [
            threading.Thread(target=self._work, name=f"trajstore-writer-{i}", daemon=True)
            for i in range(options.threads)
        ]
        for thread in self._threads:
            thread.start()

    def _open(self) -> Catalog:
        if not Catalog.exists(self.directory):
            self.directory.create()
            check_unused(self.directory)
            catalog = Catalog.create(self.directory)
            self._write_snapshot(catalog)
            return catalog
        catalog = Catalog.open(self.directory)
        remove_leftovers(self.directory, catalog)
        if catalog.generation > catalog.snapshot_generation or catalog.segment_torn:
            # Start on a clean segment: a torn last record is left behind with its segment.
            segments = self.directory.names(LOG_FOLDER)
            self._write_snapshot(catalog)
            self.directory.remove(segments)
        return catalog

    # -- adding -----------------------------------------------------------------------------------

    @property
    def next_id(self) -> int:
        """The id of the next trajectory."""
        return self._state.next_id

    def reserve_ids(self, first: int, stride: int) -> int:
        """Give out ids from ``first`` on, every ``stride``-th (ranks of one run keep apart so); return the first."""
        with self._changed:
            late = max(0, self._state.next_id - first)
            self._state.next_id = first + -(-late // stride) * stride
            self._id_stride = stride
            return self._state.next_id

    def reserve(self, nbytes: int) -> None:
        """Wait until this many bytes may be held, and count them as held.

        Raises:
            StoreWriteError: an earlier write failed.
            PendingFullError: there is no room and ``on_full`` is ``"raise"``.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self._check_open()  # in a forked child the lock may never come free
        state = self._state
        with self._changed:
            while True:
                self._check_usable()
                if state.pending_bytes == 0 or state.pending_bytes + nbytes <= self.options.max_pending_bytes:
                    state.pending_bytes += nbytes
                    return
                if self.options.on_full == "raise":
                    raise PendingFullError(
                        f"{state.pending_bytes} bytes wait to be written to {self.directory.url} and {nbytes} more "
                        f"do not fit into max_pending_bytes = {self.options.max_pending_bytes}; "
                        "add more slowly or allow more"
                    )
                state.flush_until = max(state.flush_until, state.next_id)  # do not wait for more to fill a shard
                self._changed.notify_all()
                self._changed.wait()

    def unreserve(self, nbytes: int) -> None:
        """Give back what :meth:`reserve` counted and nobody will submit."""
        with self._changed:
            self._state.pending_bytes -= nbytes
            self._changed.notify_all()

    def take_ids(self, count: int) -> tuple[list[int], bytes]:
        """Return the next ids and a UUID (16 bytes) for each."""
        with self._changed:
            ids = [self._state.next_id + i * self._id_stride for i in range(count)]
            self._state.last_taken = ids[-1]
            self._state.next_id = ids[-1] + self._id_stride
        return ids, random_uuids(count)

    def submit(self, items: Sequence[OwnedRecord], ids: Sequence[int], uuids: bytes) -> None:
        """Queue trajectories whose bytes are reserved, with the ids that were taken for them, in order of ids."""
        now = time.monotonic()
        state = self._state
        with self._changed:
            idle = not state.waiting
            for i, owned in enumerate(items):
                state.waiting.append(_Waiting(ids[i], owned, uuids[16 * i : 16 * i + 16], now))
            if idle or state.pending_bytes >= self.options.shard_bytes:  # else a thread's pause runs already
                self._changed.notify_all()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"{self.directory.url}: this writer belongs to the parent process; open a reader here"
            )
        if self._state.closing:
            raise StoreClosedError(f"{self.directory.url}: the writer was closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._state.error is not None:
            raise self._state.error

    # -- receipts ---------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Watermark: every trajectory up to this id survives a crash; -1 before the first."""
        return self._state.committed

    @property
    def pending_bytes(self) -> int:
        """Bytes of trajectories that are not committed yet."""
        return self._state.pending_bytes

    def wait(self, trajectory_id: int, timeout: float | None = None) -> bool:
        """Wait until an id is committed; return whether it is (False after ``timeout`` seconds).

        Raises:
            StoreWriteError: it cannot be written at present.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._state.committed >= trajectory_id or self._state.error is not None, timeout
            )
            if self._state.committed < trajectory_id and self._state.error is not None:
                raise self._state.error
            return self._state.committed >= trajectory_id

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything submitted before survives SIGKILL and power loss.

        A write that failed earlier is tried again first.

        Raises:
            StoreWriteError: it failed (again); names the file.
            TimeoutError: ``timeout`` seconds passed.
        """
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self.directory.url}: this writer belongs to the parent process")
        with self._changed:
            target = self._state.last_taken
            self._state.error = None
            self._state.flushes += 1
            self._state.flush_until = max(self._state.flush_until, target)
            self._changed.notify_all()
        if target >= 0 and not self.wait(target, timeout):
            raise TimeoutError(f"{self.directory.url}: not everything was written within {timeout} s")
        if self._unsettled:
            with self._log_lock:
                self._keep_house()

    # -- the pool ---------------------------------------------------------------------------------

    def _work(self) -> None:
        _yield_to_callers()
        while (group := self._next_group()) is not None:
            try:
                if group.manifest is None:
                    group.manifest = self._publish(group)
                self._commit_ready(group)
            except Exception as error:  # whatever went wrong must reach the caller, not end a thread unseen
                self._fail(group, error)

    def _next_group(self) -> _Group | None:
        """Wait for a group that should be written now; None when the writer closes and nothing waits."""
        state = self._state
        with self._changed:
            while True:
                if state.error is None:
                    if state.retry:
                        group = state.retry.popleft()
                        group.flushes = state.flushes
                        return group
                    if state.waiting:
                        pause = self._time_to_wait(state)
                        if pause <= 0:
                            return self._take_group(state)
                        self._changed.wait(pause)
                        continue
                if state.closing and (state.error is not None or not state.waiting):
                    return None
                self._changed.wait()

    def _time_to_wait(self, state: _State) -> float:
        first = state.waiting[0]
        if state.closing or first.trajectory_id <= state.flush_until or state.pending_bytes >= self.options.shard_bytes:
            return 0.0
        return first.since + self.options.commit_interval - time.monotonic()

    def _take_group(self, state: _State) -> _Group:
        items = [state.waiting.popleft()]
        schema = items[0].owned.record.schema
        nbytes = items[0].owned.nbytes
        while state.waiting:
            owned = state.waiting[0].owned
            if owned.record.schema is not schema or nbytes + owned.nbytes > self.options.shard_bytes:
                break
            items.append(state.waiting.popleft())
            nbytes += owned.nbytes
        group = _Group(state.next_ticket, state.next_shard, items, flushes=state.flushes)
        state.next_ticket += 1
        state.next_shard += 1
        return group

    def _publish(self, group: _Group) -> ShardManifest:
        name = shard_name(group.shard)
        records = [item.owned.record for item in group.items]
        encoded = self._format.encode(name, records)
        self.directory.publish(encoded.files)
        return manifest_of(encoded, self._format.name, name, records)

    def _commit_ready(self, group: _Group) -> None:
        """Record this group and all that wait for it; if an earlier one is missing, leave it to that one's thread."""
        with self._changed:
            self._state.ready[group.ticket] = group
        with self._log_lock:
            groups = []
            with self._changed:
                ticket = self._state.commit_ticket
                while ticket in self._state.ready:
                    groups.append(self._state.ready[ticket])
                    ticket += 1
            if not groups:
                return
            self._record(groups)
            with self._changed:
                for done in groups:
                    del self._state.ready[done.ticket]
                    self._state.pending_bytes -= done.nbytes
                self._state.commit_ticket = ticket
                self._state.committed = groups[-1].items[-1].trajectory_id
                self._changed.notify_all()

    def _record(self, groups: Sequence[_Group]) -> None:
        """Append the groups' records to the log, take them into the catalog, and tell the listener."""
        catalog = self.catalog
        lines = []
        told: list[int] = []
        prepared = []
        for offset, group in enumerate(groups):
            manifest = group.manifest
            if manifest is None:
                raise StoreWriteError(f"shard {group.shard} was not written")  # a bug if ever
            schema = catalog.shards.number_of_schema(manifest.schema)
            new = [] if schema in self._told_schemas or schema in told else [manifest.schema.to_json()]
            told += [schema] if new else []
            records = [item.owned.record for item in group.items]
            ids = [item.trajectory_id for item in group.items]
            uuids = b"".join(item.uuid for item in group.items)
            lines.append(
                encode_line(
                    {
                        "generation": catalog.generation + 1 + offset,
                        "operation": "add",
                        "number": group.shard,
                        "schemas": new,
                        "shard": manifest_to_json(manifest, schema),
                        "entries": _entries_json(records, ids, uuids),
                    }
                )
            )
            prepared.append((group, manifest, records, ids, uuids))
        self._append(b"".join(lines))
        self._told_schemas.update(told)
        commits = []
        for group, manifest, records, ids, uuids in prepared:
            columns = columns_of(records, ids, uuids, catalog.index.weights, len(catalog.shards))
            row = catalog.add(group.shard, manifest, columns)
            catalog.generation += 1
            commits.append(Commit(tuple(ids), row, columns))
        self._listener.committed(commits)
        try:
            self._keep_house()
        except StoreWriteError as error:
            # The commit itself stands; the housekeeping is tried again by flush and after the next commit.
            logger.warning("%s", error)
            with self._changed:
                self._state.error = error

    def _keep_house(self) -> None:
        """Evict what retention wants gone, and write the index if the log has grown much.

        Raises:
            StoreWriteError: it could not be written; nothing of it happened.
        """
        self._unsettled = True
        try:
            self.directory.settle()
        except OSError as error:
            raise StoreWriteError(f"{error}: a record that was not committed could not be cut off") from error
        self._evict_locked(self._listener.to_evict())
        self._snapshot_if_due()
        self._unsettled = False

    def _append(self, data: bytes) -> None:
        try:
            self.directory.append(self._segment, data)
        except OSError as error:
            self._unsettled = True
            raise StoreWriteError(
                f"{error}: the commit log could not be written; free space and flush() again"
            ) from error
        self.catalog.log_bytes += len(data)
        if not self.directory.can_append:
            self._segment = segment_name(self.catalog.generation + 1 + data.count(b"\n"))

    def _fail(self, group: _Group, error: Exception) -> None:
        if isinstance(error, StoreWriteError):
            failure = error
        else:
            failure = StoreWriteError(
                f"{error}: {len(group.items)} trajectories from id {group.items[0].trajectory_id} on are not on disk; "
                "they are kept in memory and flush() tries again"
            )
            failure.__cause__ = error
        logger.error("writing %s failed: %s", self.directory.url, error, exc_info=error)
        with self._changed:
            for ticket in sorted(self._state.ready):
                self._state.retry.append(self._state.ready.pop(ticket))
            if group not in self._state.retry:
                self._state.retry.append(group)
            self._state.retry = deque(sorted(self._state.retry, key=lambda item: item.ticket))
            if group.flushes == self._state.flushes:  # else flush was called meanwhile, which means: try again
                self._state.error = failure
            self._changed.notify_all()

    # -- eviction, pins, snapshots ----------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Take committed trajectories out of the store, durably; their files go when nobody needs them.

        Raises:
            StoreWriteError: the log could not be written; nothing was evicted.
        """
        with self._log_lock:
            self._check_open()
            self._evict_locked(ids)

    def _evict_locked(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        catalog = self.catalog
        ranges = ranges_of(sorted(ids))
        self._append(encode_line({"generation": catalog.generation + 1, "operation": "evict", "ids": ranges}))
        catalog.evict([(low, high) for low, high in ranges])
        catalog.generation += 1
        self._listener.evicted(ids)
        self._collect_garbage(catalog)

    def pin(self, name: str, **state: Any) -> int:
        """Keep what is committed now readable under a name, and return its generation.

        Raises:
            StoreWriteError: it could not be written.
        """
        with self._log_lock:
            self._check_open()
            file = self.catalog.pin_file(name, **state)
            try:
                self.directory.publish([file])
            except OSError as error:
                raise StoreWriteError(f"{error}: nothing was pinned") from error
            self.catalog.load_pins()
            return self.catalog.generation

    def unpin(self, name: str) -> None:
        """Let go of a pin; evicted trajectories that only it named are deleted."""
        with self._log_lock:
            self._check_open()
            self.directory.remove([f"{PINS_FOLDER}/{name}.json"])
            self.catalog.load_pins()
            self._collect_garbage(self.catalog)

    @contextmanager
    def keeping_files(self) -> Iterator[None]:
        """Delete no shard meanwhile, whatever is evicted; the next eviction or snapshot makes up for it."""
        with self._log_lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._log_lock:
                self._holds -= 1

    def _collect_garbage(self, catalog: Catalog) -> None:
        if not self._holds:
            collect_garbage(self.directory, catalog)

    def snapshot(self) -> None:
        """Write the index whole and begin a new log segment.

        Raises:
            StoreWriteError: it could not be written; the log still has everything.
        """
        with self._log_lock:
            self._write_snapshot(self.catalog)
            self._segment = segment_name(self.catalog.generation + 1)

    def _snapshot_if_due(self) -> None:
        if self.catalog.log_bytes > max(SNAPSHOT_AFTER_BYTES, 2 * self.catalog.snapshot_bytes):
            self._write_snapshot(self.catalog)
            self._segment = segment_name(self.catalog.generation + 1)

    def _write_snapshot(self, catalog: Catalog) -> None:
        try:
            index = catalog.snapshot_file()
            self.directory.publish([index])
            self.directory.publish([catalog.metadata_file(trajectory_format=self._format.name, **self._metadata())])
        except OSError as error:
            raise StoreWriteError(f"{error}: the index could not be written; the log still has everything") from error
        catalog.snapshot_generation = catalog.generation
        catalog.snapshot_bytes = sum(memoryview(piece).nbytes for piece in index.pieces)
        catalog.log_bytes = 0
        self._collect_garbage(catalog)
        remove_segments(self.directory, catalog)

    def is_own_thread(self) -> bool:
        """Return whether the caller is one of the pool's threads, which cannot wait for themselves."""
        return threading.current_thread() in self._threads

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, write a snapshot, stop the threads and give the lock back. Closing again does nothing.

        Raises:
            StoreWriteError: something did not reach the disk; the writer is closed all the same.
        """
        if os.getpid() != self._pid or self._state.closing:
            return
        try:
            self.flush()
            if self.catalog.generation > self.catalog.snapshot_generation:
                self.snapshot()
        finally:
            with self._changed:
                self._state.closing = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()
            self._lock.release()


def _yield_to_callers() -> None:
    """Lower this thread's priority a little: whoever adds and trains goes first when cores are scarce."""
    with contextlib.suppress(OSError, AttributeError):  # a matter of Linux; elsewhere nothing is lost
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))


def random_uuids(count: int) -> bytes:
    """Return random UUIDs (version 4), 16 bytes each."""
    raw = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    raw[:, 6] = (raw[:, 6] & 0x0F) | 0x40
    raw[:, 8] = (raw[:, 8] & 0x3F) | 0x80
    return raw.tobytes()


def _entries_json(records: Sequence[Record], ids: Sequence[int], uuids: bytes) -> dict[str, Any]:
    return {
        "ids": ranges_of(ids),
        "extents": [[r.extent.steps, r.extent.batch, r.extent.extra, r.extent.document] for r in records],
        "max_episode_length": [record.max_episode_length for record in records],
        "versions": [record.versions for record in records],
        "weights": [record.model_weights_id for record in records],
        "uuids": uuids.hex(),
    }
