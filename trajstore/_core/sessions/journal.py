"""The journal of one process: appends records in groups, each group with one write and one ``fdatasync``."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import uuid
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue

from trajstore._core.base import locks
from trajstore._core.base.clock import microseconds
from trajstore._core.base.interrupts import closed_gate, start_thread
from trajstore._core.files.descriptors import Descriptor, write_all
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.holder import holder_document
from trajstore._core.sessions.records import CALLS_FOLDER, SUFFIX, frames, payload
from trajstore.errors import StoreClosedError, StoreWriteError

_LONGEST = 1.0
"""Seconds after which a waiting thread looks again: an interrupt may have swallowed its wake-up."""

_FULL_BYTES = 16 << 20
_FULL_SESSIONS = 1_000
"""Of the larger journals: opening a session looks at all sessions of the journals."""

_WORTH_BYTES = 64 << 10
"""From which a journal whose sessions are all over is deleted while its process lives."""


_MOST_SPACE, _LEAST_SPACE, _WRITES = 1 << 20, 64 << 10, 8
"""Zeros that follow the records, for about eight writes like the one that adds them. A write into existing bytes need
not wait for the file system's own journal, which halves the time of ``fdatasync``."""


class Entry:
    """Records that wait to be written together.

    Attributes:
        payloads: theirs.
        is_queued: whether a journal has it.
        is_done: whether it is durable, or failed.
        is_next: whether the thread that waits for it writes next.
        is_awaited: whether a thread waits for it.
        error: why it failed.
        gate: held until the thread that waits for the record shall look again.
        group: the records that were written with it and whose threads are still to be woken.
        future: of the task that waits for it; None without one, or once it is resumed.
    """

    __slots__ = ("error", "future", "gate", "group", "is_awaited", "is_done", "is_next", "is_queued", "payloads")

    def __init__(self, *payloads: bytes) -> None:
        self.payloads = payloads
        self.is_queued = self.is_done = self.is_next = self.is_awaited = False
        self.error: OSError | None = None
        self.gate = closed_gate()
        self.group: deque[Entry] = deque()
        self.future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the waiting thread look again; called with ``CallJournal._lock``."""
        if self.gate.locked():
            self.gate.release()

    def wake_following(self) -> None:
        """Wake the next thread of the group, which wakes the one after it; all at once they would hinder each other."""
        while self.group:
            if (entry := self.group.popleft()).is_awaited:
                entry.wake()
                return


class CallJournal:
    """A file ``calls/<20 digits>-<32 hex>.calls``, locked with ``flock`` while its process lives. Thread-safe.

    The first thread that waits writes the records of all that wait, then wakes them and one that came meanwhile,
    which writes next. So hardly one waits for a lock, which others might get again and again. A failed write is undone:
    its records are not acknowledged, and the next write begins where it began.

    Args:
        root: the store's folder.
        store_id: UUID of the store.

    Attributes:
        name: of the file, relative to the store.
        size: bytes of all durable records; the file has zeros after them.
        failures: number of failed writes; records that were prepared before one are refused after it.
    """

    def __init__(self, root: HeldFolder, store_id: str) -> None:
        self._root = root
        self._pid = os.getpid()
        self._queue: list[Entry] = []
        self._lock = locks.lock("CallJournal._lock")
        self._writing = locks.lock("CallJournal._writing")
        self._is_busy = False  # True: a thread writes, or will at once, and the others need not wait for the lock
        self._is_dirty = False
        self._written: tuple[int, list[Entry]] | None = None  # the size after a write, and its records
        self._of_tasks: SimpleQueue[Entry | None] = SimpleQueue()  # for the thread that waits in place of tasks
        self._waiting: threading.Thread | None = None
        self.failures = 0
        self._opened = 0
        self.size = self._space = 0  # _space: size of the file, unless it is dirty
        root.make_folder(CALLS_FOLDER, shared=True)
        root.sync()
        self.name = f"{CALLS_FOLDER}/{microseconds():020d}-{uuid.uuid4().hex}{SUFFIX}"
        self._file = Descriptor(root.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL), of_process=True)
        fcntl.flock(self._file.number, fcntl.LOCK_EX)
        try:
            self.append(payload({"journal": 1, "store_id": store_id, **holder_document()}))
            root.sync(CALLS_FOLDER)
        except BaseException:
            self._file.close()
            root.unlink(self.name)
            raise

    def check_process(self) -> None:
        """Raise :class:`StoreClosedError` in a forked child."""
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"{self._root.path}: this session belongs to the parent process; open it with trajstore.Sessions here"
            )

    def check(self) -> None:
        """Raise :class:`StoreClosedError` in a forked child, and after :meth:`close`."""
        self.check_process()
        if not self._file.is_open:
            raise StoreClosedError(f"{self._root.path}: the sessions were closed; open them again")

    @property
    def is_full(self) -> bool:
        """Whether new sessions go to another journal."""
        return self.size >= _FULL_BYTES or self._opened >= _FULL_SESSIONS

    @property
    def is_worth_deleting(self) -> bool:
        """Whether it is deleted before its process closes, if its sessions are all over."""
        return self.is_full or self.size >= _WORTH_BYTES

    def next_number(self) -> int:
        """Return the number of a new session in it."""
        self._opened += 1
        return self._opened - 1

    def queue(self, entry: Entry, failures: int) -> bool:
        """Queue a record; return False, without doing so, if a write failed since ``failures`` was read."""
        with self._lock:
            if failures == self.failures:
                self._queue.append(entry)
                entry.is_queued = True
        return entry.is_queued

    def wait(self, entry: Entry) -> None:
        """Return when a queued record is durable.

        Raises:
            StoreWriteError: it was not written.
        """
        entry.is_awaited = True  # before it is seen whether it is done: else it may be passed over
        try:
            while not entry.is_done:
                if self._is_busy and not entry.is_next and entry.gate.acquire(timeout=_LONGEST):
                    continue
                with self._writing:
                    self._is_busy = True
                    try:
                        if not entry.is_done:
                            self._write()
                    finally:
                        with self._lock:
                            self._is_busy = bool(self._queue)
                            for following in self._queue[:1]:
                                following.is_next = True
                                following.wake()
        finally:
            entry.is_awaited = False
            entry.wake_following()
        self._check_written(entry)

    async def written(self, entry: Entry) -> None:
        """:meth:`wait`, in a task of an event loop: a thread of the journal waits for the records of all tasks."""
        future = entry.future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._waiting is None:
                waiting = threading.Thread(target=self._wait_for_tasks, name="trajstore-calls", daemon=True)
                start_thread(waiting)  # if it cannot be started, the next task tries again
                self._waiting = waiting
        self._of_tasks.put(entry)
        if not entry.is_done:
            await future
        self._check_written(entry)

    def _wait_for_tasks(self) -> None:
        while (entry := self._of_tasks.get()) is not None:
            with contextlib.suppress(StoreWriteError):  # the task raises it
                self.wait(entry)
            _resume_tasks([entry])  # does nothing, unless an interrupt ended the thread that wrote the record

    def _check_written(self, entry: Entry) -> None:
        if entry.error is not None:
            raise StoreWriteError(
                f"{self._root.path / self.name}: {entry.error.strerror or entry.error}: nothing was recorded; try again"
            ) from entry.error

    def append(self, *payloads: bytes) -> None:
        """Write records, durably.

        Raises:
            StoreWriteError: it was not written.
        """
        entry = Entry(*payloads)
        while not self.queue(entry, self.failures):  # a write failed just now, upon which these records do not build
            pass
        self.wait(entry)

    def _write(self) -> None:
        """Write all queued records; the caller holds ``_writing``. May be interrupted anywhere and called again."""
        self._settle()
        with self._lock:
            entries = [entry for entry in self._queue if not entry.is_done]
        try:
            descriptor = self._file.number
            if self._is_dirty:
                self._cut(descriptor)
            self._is_dirty = True
            pieces = frames(content for entry in entries for content in entry.payloads)
            nbytes = sum(map(len, pieces))
            size = self.size + nbytes
            if size > self._space:
                zeros = min(max(_WRITES * nbytes, _LEAST_SPACE), _MOST_SPACE)
                self._space = size + zeros
                pieces.append(bytes(zeros))
            write_all(descriptor, pieces)
            os.lseek(descriptor, size, os.SEEK_SET)
            os.fdatasync(descriptor)
        except (OSError, ValueError, MemoryError) as error:
            self._fail(error if isinstance(error, OSError) else OSError(str(error) or "out of memory"))
        else:
            self._written = size, entries
            self._settle()

    def _settle(self) -> None:
        """Mark the records of a finished write."""
        if self._written is not None:
            self.size, entries = self._written
            written = set(entries)
            with self._lock:
                self._queue = [entry for entry in self._queue if entry not in written]
                group = deque(entries)
                for entry in entries:
                    entry.group = group
                    entry.is_done = True
            for entry in entries[:1]:
                entry.wake_following()
            _resume_tasks(entries)
            self._is_dirty, self._written = False, None

    def _fail(self, error: OSError) -> None:
        """Refuse all queued records: later ones may build upon those that failed."""
        with self._lock:
            self.failures += 1
            for entry in reversed(self._queue):  # if interrupted, the first ones stay
                entry.error = error
                entry.is_done = True
                entry.wake()
            failed, self._queue = self._queue, []
        _resume_tasks(failed)
        self._undo()

    def _undo(self) -> None:
        """Remove what a failed write left; if this fails, too, the next write does it first."""
        try:
            self._cut(self._file.number)
            os.fsync(self._file.number)
        except (OSError, ValueError):
            return
        self._is_dirty = False

    def _cut(self, descriptor: int) -> None:
        """Remove what follows the durable records."""
        os.ftruncate(descriptor, self.size)
        os.lseek(descriptor, self.size, os.SEEK_SET)
        self._space = self.size

    def close(self) -> None:
        """Release the file. Open sessions in it can be continued by other processes."""
        with self._writing:
            if os.getpid() == self._pid:
                self._settle()
                with contextlib.suppress(OSError):  # closed before; zeros do no harm
                    self._cut(self._file.number)
                self._file.close()
                self._of_tasks.put(None)


def _resume_tasks(entries: Iterable[Entry]) -> None:
    """Resume the tasks that wait for these records, which are done, with one call to each event loop."""
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for entry in entries:
        future, entry.future = entry.future, None
        if future is not None:
            futures.setdefault(future.get_loop(), []).append(future)
    for loop, waiting in futures.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has no tasks that wait
            loop.call_soon_threadsafe(_resume, waiting)


def _resume(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # cancelled
            future.set_result(None)
