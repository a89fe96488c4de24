"""FIFO queue between callers and writer threads, bounded by bytes. No I/O.

It assigns ids and the commit order, and reports errors and completion to ``flush`` and ``wait``.

A caller may be interrupted between any two instructions. Therefore a batch enters with one call (``deque.append``),
ids are assigned before that and never reused, and the byte count is recomputed before anyone waits for room.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from trajstore._core.base import locks
from trajstore._core.base.interrupts import WaitList, seconds_until
from trajstore._core.columns.flat import Copied
from trajstore._core.store.additions import NewEntries
from trajstore._core.writing.groups import Batch, Group, fill, random_uuids, runs_of
from trajstore._core.writing.options import WriterOptions
from trajstore.errors import StoreClosedError, StoreWriteError, TrajectoryUnavailableError, UnwritableTrajectoryError

_UUIDS_AHEAD = 256

_PAUSES = (0.05, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before the second, third, ... attempt to write a group; the last value applies to all later ones."""


class WriteQueue:
    """Thread-safe; one lock guards everything.

    Args:
        url: the store's name in messages.
        options: limits.
        next_id: first id to assign.
        next_shard: first shard number to assign.
        check_usable: raises when the caller's process must not write.

    Attributes:
        retries: failed attempts before successful ones.
        set_aside: number of trajectories rejected as unwritable.
    """

    def __init__(
        self, url: str, options: WriterOptions, next_id: int, next_shard: int, check_usable: Callable[[], None]
    ) -> None:
        self.retries = 0
        self.set_aside = 0
        self._url = url
        self._options = options
        self.check_process = check_usable
        self._lock = locks.rlock("WriteQueue._lock")  # a signal handler may flush while its thread is in here
        self._wait_list = WaitList()
        self._adding: dict[int, weakref.ref[Batch]] = {}  # reserved, not queued yet
        self._waiting: deque[Batch] = deque()
        self._groups: dict[int, Group] = {}  # by ticket: taken, unfinished
        self._retry: deque[Group] = deque()
        self._retry_at = 0.0
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
        self._failure: StoreWriteError | None = None  # cause of the current write failure
        self._untold: StoreWriteError | None = None  # error to raise to the next caller
        self._rejected: list[UnwritableTrajectoryError] = []
        self._uuids = b""

    # -- adding -----------------------------------------------------------------------------------

    def reserve_ids(self, first: int, stride: int) -> int:
        """Assign every ``stride``-th id from ``first`` on; ranks of one run interleave this way. Return the first."""
        with self._lock:
            late = max(0, self._next_id - first)
            self._next_id = first + -(-late // stride) * stride
            self._stride = stride
            return self._next_id

    def reserve(self, batch: Batch, *, first: bool) -> None:
        """Wait until there is room for the bytes of a batch, and reserve it.

        Args:
            batch: has no trajectories yet.
            first: it is the first batch of a call; only this one is refused because of earlier errors.

        Raises:
            StoreWriteError: an earlier write failed, or there is no room and writing currently fails.
            UnwritableTrajectoryError: earlier trajectories were rejected as unwritable.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self.check_process()  # first: in a forked child the lock may stay held forever
        while True:
            with self._lock:
                if self._closing:
                    raise StoreClosedError(f"{self._url}: the writer was closed")
                if first and (self._untold is not None or self._rejected):
                    self.tell_untold()
                if self._fits(batch.nbytes):
                    self._adding[id(batch)] = weakref.ref(batch)
                    self._pending_bytes += batch.nbytes
                    return
                if self._failure is not None:  # room may never become free
                    self._untold = None
                    raise self._failure
                self._flush_until = max(self._flush_until, self._next_id)  # write shards that are not full yet
                self._wait_list.wake()
                gate = self._wait_list.gate()
            self._wait_list.wait(gate)

    def _fits(self, nbytes: int) -> bool:
        limit = self._options.max_pending_bytes
        if self._pending_bytes == 0 or self._pending_bytes + nbytes <= limit:
            return True
        self._recount()
        return self._pending_bytes == 0 or self._pending_bytes + nbytes <= limit

    def _recount(self) -> None:
        """Recompute the pending bytes; an interrupt may have skipped an update."""
        queued = {id(batch) for batch in self._waiting}
        adding = 0
        for key, reference in list(self._adding.items()):
            batch = reference()
            if batch is None or batch.taken or key in queued:
                del self._adding[key]
            else:
                adding += batch.nbytes
        waiting = sum([run.nbytes for batch in self._waiting for run in batch.runs])
        self._pending_bytes = adding + waiting + sum([group.nbytes for group in self._groups.values()])

    def take_ids(self, count: int) -> tuple[list[int], bytes]:
        """Return the next ids and a UUID (16 bytes) for each; they are never assigned again."""
        with self._lock:
            if len(self._uuids) < 16 * count:
                self._uuids = random_uuids(max(count, _UUIDS_AHEAD))
            uuids, self._uuids = self._uuids[: 16 * count], self._uuids[16 * count :]
            ids = [self._next_id + i * self._stride for i in range(count)]
            self._next_id = ids[-1] + self._stride
            return ids, uuids

    def submit(self, batch: Batch, copies: Sequence[Copied], entries: NewEntries) -> None:
        """Queue trajectories whose bytes are reserved, in the order of their ids.

        Raises:
            StoreClosedError: the writer was closed meanwhile.
        """
        batch.runs = runs_of([block for _, block in copies], entries)
        batch.since = time.monotonic()
        with self._lock:
            if self._closing:
                raise StoreClosedError(f"{self._url}: the writer was closed")
            if batch.first <= self._newest():  # a signal handler added trajectories meanwhile
                raise StoreWriteError(f"{self._url}: later trajectories were queued meanwhile; add these again")
            idle = not self._waiting
            self._waiting.append(batch)  # now it will be written
            self._adding.pop(id(batch), None)
            if idle or self._pending_bytes >= self._options.shard_bytes:  # else a thread's timer is already running
                self._wait_list.wake()

    def withdraw(self, batch: Batch) -> bool:
        """Release a reservation by :meth:`reserve` unless the batch is queued; return whether it was released."""
        with self._lock:
            if batch.taken or any(other is batch for other in self._waiting):
                self._wait_list.wake()
                return False
            self._adding.pop(id(batch), None)
            self._recount()
            self._wait_list.wake()
            return True

    # -- receipts ---------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Highest id up to which every trajectory is durable; -1 before the first."""
        return self._committed

    @property
    def pending_bytes(self) -> int:
        """Bytes of uncommitted trajectories."""
        return self._pending_bytes

    @property
    def pending_ids(self) -> list[int]:
        """Ids of uncommitted trajectories, in no order."""
        with self._lock:
            waiting = [number for batch in self._waiting for number in batch.ids]
            return waiting + [number for group in self._groups.values() for number in group.ids]

    def wait(self, trajectory_id: int, timeout: float | None = None) -> bool:
        """Wait until an id is committed; return False after ``timeout`` seconds.

        Raises:
            StoreWriteError: writing currently fails.
            TrajectoryUnavailableError: no trajectory of this id was added.
            StoreClosedError: the writer was closed and could not write it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._committed >= trajectory_id:
                    return True
                if self._failure is not None:
                    self._untold = None
                    raise self._failure
                if trajectory_id > self._newest():
                    raise TrajectoryUnavailableError(f"{self._url}: no trajectory has the id {trajectory_id}")
                left = seconds_until(deadline)
                if left is not None and left <= 0:
                    return False
                gate = self._wait_list.gate()
            self._wait_list.wait(gate, left)

    def _newest(self) -> int:
        """Return the highest queued id; -1 if there is none."""
        return self._waiting[-1].runs[-1].last if self._waiting else self._last_taken

    def begin_flush(self) -> int:
        """Start writing everything submitted, and retry failed writes now; return the last submitted id, or -1."""
        with self._lock:
            self._failure = self._untold = None
            self._retry_at = 0.0
            self._flushes += 1
            self._flush_until = max(self._flush_until, self._newest())
            self._wait_list.wake()
            return self._newest()

    def tell_untold(self) -> None:
        """Raise each error that was not reported yet, once.

        Raises:
            StoreWriteError: a write failed.
            UnwritableTrajectoryError: trajectories were rejected as unwritable.
        """
        with self._lock:
            if self._untold is not None:
                error, self._untold = self._untold, None
                raise error
            if self._rejected:
                rejected, self._rejected = self._rejected, []
                raise rejected[0] if len(rejected) == 1 else UnwritableTrajectoryError.of(rejected)

    def close(self) -> None:
        """Refuse new batches; threads that ask for a group get the remaining ones, then None."""
        with self._lock:
            self._closing = True
            self._wait_list.wake()

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    # -- for the pool -----------------------------------------------------------------------------

    def next_group(self, meanwhile: Callable[[], None] = lambda: None) -> Group | None:
        """Wait for a group that is due; None when the queue closes and nothing can be written.

        ``meanwhile`` is called from time to time during the wait.
        """
        while True:
            with self._lock:
                pause = self._time_to_wait()
                if pause is not None and pause <= 0:
                    return self._take_group()
                if self._closing and pause is None:
                    return None
                gate = self._wait_list.gate()
            self._wait_list.wait(gate, pause)
            meanwhile()

    def _time_to_wait(self) -> float | None:
        """Return the seconds until a group is due; None if there is none."""
        if self._retry:
            if self._closing:
                return 0.0 if self._failure is None else None
            return self._retry_at - time.monotonic()
        if not self._waiting or (self._closing and self._failure is not None):
            return None
        first = self._waiting[0]
        flushed = first.first <= self._flush_until
        if self._closing or flushed or self._pending_bytes >= self._options.shard_bytes:
            return 0.0
        return first.since + self._options.commit_interval - time.monotonic()

    def _take_group(self) -> Group:
        if self._retry:
            group = self._retry.popleft()
            group.flushes = self._flushes
            return group
        group = Group(self._next_ticket, self._flushes)
        fill(group, self._waiting, self._next_shard, self._options.shard_bytes)
        self._next_ticket += 1
        self._next_shard += len(group.parts)
        self._last_taken = group.last
        self._groups[group.ticket] = group
        return group

    def new_shard(self) -> int:
        """Assign and return a shard number."""
        with self._lock:
            self._next_shard += 1
            return self._next_shard - 1

    def published(self, group: Group) -> None:
        """Mark a group's files as durable."""
        with self._lock:
            group.is_published = True
            self._ready[group.ticket] = group

    def take_ready(self) -> list[Group]:
        """Take all groups that can be committed now, in order: published, with no unpublished one before them.

        The caller must :meth:`finish` or :meth:`fail` them before the next call.
        """
        with self._lock:
            groups: list[Group] = []
            while (group := self._ready.pop(self._commit_ticket + len(groups), None)) is not None:
                groups.append(group)
            return groups

    def finish(self, groups: Sequence[Group]) -> int:
        """Mark groups as committed; return the number of failed attempts before that."""
        with self._lock:
            for group in groups:
                self._groups.pop(group.ticket, None)
            self._pending_bytes -= sum([group.nbytes for group in groups])
            self._commit_ticket += len(groups)
            self._committed = groups[-1].last
            overcome = sum([group.failures for group in groups])
            self.retries += overcome
            if overcome:
                self._failure = self._untold = None
            self._wait_list.wake()
            return overcome

    def fail(self, groups: Sequence[Group], error: StoreWriteError) -> None:
        """Schedule a retry of failed groups and of all groups waiting for them.

        The error is reported to callers from the second failed attempt on; a single failure stays internal.
        """
        with self._lock:
            kept = sorted([*groups, *self._retry, *self._ready.values()], key=lambda group: group.ticket)
            self._ready.clear()
            self._retry = deque(kept)
            for group in groups:
                group.failures += 1
            attempts = max(group.failures for group in groups)
            self._retry_at = time.monotonic() + _PAUSES[min(attempts, len(_PAUSES)) - 1]
            if groups[0].flushes != self._flushes:  # flush was called meanwhile: retry at once
                self._retry_at = 0.0
            elif attempts > 1:
                if self._failure is None:
                    self._untold = error
                self._failure = error
            self._wait_list.wake()

    def reject(self, group: Group, error: UnwritableTrajectoryError, nbytes: int) -> None:
        """Count unwritable trajectories that were removed from their group."""
        with self._lock:
            group.nbytes -= nbytes
            self._pending_bytes -= nbytes
            self.set_aside += len(error.ids)
            self._rejected.append(error)
            self._wait_list.wake()

    def report(self, error: StoreWriteError) -> None:
        """Set an error that concerns no group; the next ``add``, ``flush`` or ``close`` raises it."""
        with self._lock:
            self._untold = error
