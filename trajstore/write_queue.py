"""The queue between those who add and the threads that write: bounded by bytes, first in, first out.

Owns ids, the order of commits, and what ``flush`` and ``wait`` are told. No I/O.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trajstore.arguments import seconds, whole
from trajstore.commit_log import NewShard
from trajstore.errors import ConfigurationError, PendingFullError, StoreClosedError, StoreWriteError
from trajstore.formats.base import ShardManifest
from trajstore.limits import shown
from trajstore.pending import OwnedRecord

_UUIDS_AHEAD = 256


@dataclass(frozen=True)
class WriterOptions:
    """How a writer uses threads, memory and files.

    Attributes:
        threads: pool threads that encode and write shards.
        max_pending_bytes: memory for trajectories that are not committed yet.
        on_full: ``"block"`` waits until there is room, ``"raise"`` raises :class:`PendingFullError`.
        shard_bytes: a shard is closed when it holds this many bytes.
        commit_interval: seconds that a trajectory may wait for others to share its shard; ``flush`` does not wait.
        snapshot_bytes: the index is written whole when the commit log has grown by this, or by twice the index's
            size if that is more.

    Raises:
        ConfigurationError: a value is out of range.
    """

    threads: int = 2
    max_pending_bytes: int = 256 << 20
    on_full: Literal["block", "raise"] = "block"
    shard_bytes: int = 16 << 20
    commit_interval: float = 0.05
    snapshot_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("max_pending_bytes", 1), ("shard_bytes", 1), ("snapshot_bytes", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        object.__setattr__(self, "commit_interval", seconds("commit_interval", self.commit_interval))
        if self.on_full not in ("block", "raise"):
            raise ConfigurationError(f"on_full: {shown(self.on_full)}, must be 'block' or 'raise'")


@dataclass(slots=True)
class _Batch:
    """What one call added, from ``start`` on."""

    owned: Sequence[OwnedRecord]
    ids: Sequence[int]
    uuids: bytes
    since: float
    start: int = 0


@dataclass(slots=True)
class Group:
    """Trajectories that become one shard."""

    ticket: int
    """Groups are committed in this order, without gaps."""
    shard: int
    flushes: int
    """Calls of ``flush`` when this attempt began."""
    owned: list[OwnedRecord] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    uuids: bytes = b""
    nbytes: int = 0
    manifest: ShardManifest | None = None
    """Set when the shard's files are durable."""

    def new_shard(self) -> NewShard:
        """Return what is to be recorded of this group once it is published."""
        if self.manifest is None:
            raise StoreWriteError(f"shard {self.shard} was not written")  # a bug if ever
        return NewShard(self.shard, self.manifest, [item.record for item in self.owned], self.ids, self.uuids)


class WriteQueue:
    """Safe to call from several threads; everything is guarded by one condition.

    Args:
        url: what messages call the store.
        options: limits.
        next_id: first id to give out.
        next_shard: first shard number to give out.
        check_usable: raises when the caller's process must not write.
    """

    def __init__(
        self, url: str, options: WriterOptions, next_id: int, next_shard: int, check_usable: Callable[[], None]
    ) -> None:
        self._url = url
        self._options = options
        self._check_process = check_usable
        self._changed = threading.Condition()
        self._waiting: deque[_Batch] = deque()
        self._retry: deque[Group] = deque()
        self._ready: dict[int, Group] = {}
        self._pending_bytes = 0
        self._next_id = next_id
        self._stride = 1
        self._last_taken = -1
        self._next_ticket = 0
        self._commit_ticket = 0
        self._next_shard = next_shard
        self._flush_until = -1
        self._committed = next_id - 1
        self._flushes = 0
        self._closing = False
        self._error: StoreWriteError | None = None
        self._uuids = b""

    # -- adding -----------------------------------------------------------------------------------

    def reserve_ids(self, first: int, stride: int) -> int:
        """Give out ids from ``first`` on, every ``stride``-th (ranks of one run keep apart so); return the first."""
        with self._changed:
            late = max(0, self._next_id - first)
            self._next_id = first + -(-late // stride) * stride
            self._stride = stride
            return self._next_id

    def reserve(self, nbytes: int) -> None:
        """Wait until this many bytes may be held, and count them as held.

        Raises:
            StoreWriteError: an earlier write failed.
            PendingFullError: there is no room and ``on_full`` is ``"raise"``.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self._check_process()  # first: in a forked child the lock may never come free
        with self._changed:
            while True:
                if self._closing:
                    raise StoreClosedError(f"{self._url}: the writer was closed")
                if self._error is not None:
                    raise self._error
                if self._pending_bytes == 0 or self._pending_bytes + nbytes <= self._options.max_pending_bytes:
                    self._pending_bytes += nbytes
                    return
                if self._options.on_full == "raise":
                    raise PendingFullError(
                        f"{self._pending_bytes} bytes wait to be written to {self._url} and {nbytes} more "
                        f"do not fit into max_pending_bytes = {self._options.max_pending_bytes}; "
                        "add more slowly or allow more"
                    )
                self._flush_until = max(self._flush_until, self._next_id)  # do not wait for more to fill a shard
                self._changed.notify_all()
                self._changed.wait()

    def unreserve(self, nbytes: int) -> None:
        """Give back what :meth:`reserve` counted and nobody will submit."""
        with self._changed:
            self._pending_bytes -= nbytes
            self._changed.notify_all()

    def take_ids(self, count: int) -> tuple[list[int], bytes]:
        """Return the next ids and a UUID (16 bytes) for each."""
        with self._changed:
            ids = [self._next_id + i * self._stride for i in range(count)]
            self._last_taken = ids[-1]
            self._next_id = ids[-1] + self._stride
            if len(self._uuids) < 16 * count:
                self._uuids = random_uuids(max(count, _UUIDS_AHEAD))
            uuids, self._uuids = self._uuids[: 16 * count], self._uuids[16 * count :]
        return ids, uuids

    def submit(self, owned: Sequence[OwnedRecord], ids: Sequence[int], uuids: bytes) -> None:
        """Queue trajectories whose bytes are reserved, with the ids that were taken for them, in order of ids."""
        batch = _Batch(owned, ids, uuids, time.monotonic())
        with self._changed:
            idle = not self._waiting
            self._waiting.append(batch)
            if idle or self._pending_bytes >= self._options.shard_bytes:  # else a thread's pause runs already
                self._changed.notify_all()

    # -- receipts ---------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Watermark: every trajectory up to this id survives a crash; -1 before the first."""
        return self._committed

    @property
    def pending_bytes(self) -> int:
        """Bytes of trajectories that are not committed yet."""
        return self._pending_bytes

    def wait(self, trajectory_id: int, timeout: float | None = None) -> bool:
        """Wait until an id is committed; return whether it is (False after ``timeout`` seconds).

        Raises:
            StoreWriteError: it cannot be written at present.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._committed >= trajectory_id or self._error is not None, timeout)
            if self._committed < trajectory_id and self._error is not None:
                raise self._error
            return self._committed >= trajectory_id

    def begin_flush(self) -> int:
        """Let everything that was submitted be written now, failed writes again; return the last id of it, or -1."""
        with self._changed:
            self._error = None
            self._flushes += 1
            self._flush_until = max(self._flush_until, self._last_taken)
            self._changed.notify_all()
            return self._last_taken

    def close(self) -> None:
        """Take nothing more; threads that ask for a group get what is left and then None."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    # -- for the pool -----------------------------------------------------------------------------

    def next_group(self) -> Group | None:
        """Wait for a group that should be written now; None when the queue closes and nothing waits."""
        with self._changed:
            while True:
                if self._error is None:
                    if self._retry:
                        group = self._retry.popleft()
                        group.flushes = self._flushes
                        return group
                    if self._waiting:
                        pause = self._time_to_wait()
                        if pause <= 0:
                            return self._take_group()
                        self._changed.wait(pause)
                        continue
                if self._closing and (self._error is not None or not self._waiting):
                    return None
                self._changed.wait()

    def _time_to_wait(self) -> float:
        first = self._waiting[0]
        flushed = first.ids[first.start] <= self._flush_until
        if self._closing or flushed or self._pending_bytes >= self._options.shard_bytes:
            return 0.0
        return first.since + self._options.commit_interval - time.monotonic()

    def _take_group(self) -> Group:
        group = Group(self._next_ticket, self._next_shard, self._flushes)
        self._next_ticket += 1
        self._next_shard += 1
        schema = self._waiting[0].owned[self._waiting[0].start].record.schema
        while self._waiting:
            batch = self._waiting[0]
            stop = batch.start
            for item in batch.owned[stop:] if stop else batch.owned:
                full = group.nbytes + item.nbytes > self._options.shard_bytes and group.nbytes > 0
                if full or item.record.schema is not schema:
                    break
                group.nbytes += item.nbytes
                stop += 1
            group.owned += batch.owned[batch.start : stop]
            group.ids += batch.ids[batch.start : stop]
            group.uuids += batch.uuids[16 * batch.start : 16 * stop]
            if stop < len(batch.owned):
                batch.start = stop
                break
            self._waiting.popleft()
        return group

    def published(self, group: Group) -> None:
        """Note that a group's files are durable."""
        with self._changed:
            self._ready[group.ticket] = group

    def take_ready(self) -> list[Group]:
        """Take all groups that can be committed now, in order: published ones, none missing before them.

        The caller says :meth:`finish` or :meth:`fail` of them before anybody takes more.
        """
        with self._changed:
            groups: list[Group] = []
            while (group := self._ready.pop(self._commit_ticket + len(groups), None)) is not None:
                groups.append(group)
            return groups

    def finish(self, groups: Sequence[Group]) -> None:
        """Note that groups are committed."""
        with self._changed:
            self._pending_bytes -= sum(group.nbytes for group in groups)
            self._commit_ticket += len(groups)
            self._committed = groups[-1].ids[-1]
            self._changed.notify_all()

    def fail(self, groups: Sequence[Group], error: StoreWriteError) -> None:
        """Keep groups that could not be written, and all that wait for them, until the next ``flush``."""
        with self._changed:
            kept = sorted([*groups, *self._retry, *self._ready.values()], key=lambda group: group.ticket)
            self._ready.clear()
            self._retry = deque(kept)
            if groups[0].flushes == self._flushes:  # else flush was called meanwhile, which means: try again
                self._error = error
            self._changed.notify_all()

    def tell(self, error: StoreWriteError) -> None:
        """Let the next ``add`` or ``wait`` raise an error that concerns no group."""
        with self._changed:
            self._error = error


def random_uuids(count: int) -> bytes:
    """Return random UUIDs (version 4), 16 bytes each."""
    raw = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    raw[:, 6] = (raw[:, 6] & 0x0F) | 0x40
    raw[:, 8] = (raw[:, 8] & 0x3F) | 0x80
    return raw.tobytes()
