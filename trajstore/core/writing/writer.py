"""The one writer of a directory: a thread pool between the queue of what was added and the commit log.

The way of a group: taken from the queue by a pool thread, encoded, published (files durable), then, in
the order of ids, committed in the log (one append for all groups that are ready), then visible. What a
crash leaves at each point is written in docs/design/store.md. Groups are encoded and published without a lock, and
committed with ``CommitLog._lock`` held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trajstore.core.base import locks
from trajstore.core.base.interrupts import start_thread, uninterrupted
from trajstore.core.files.base import Directory
from trajstore.core.formats.base import TrajectoryFormat
from trajstore.core.formats.checksums import encoded_shard
from trajstore.core.store.given import Said
from trajstore.core.store.row_notes import Rows, RowShard, content_of_rows
from trajstore.core.store.shard_table import shard_name
from trajstore.core.writing.callbacks import CommitCallbacks
from trajstore.core.writing.commit_log import CommitLog, Turn, check_process
from trajstore.core.writing.commits import CommitListener
from trajstore.core.writing.groups import Group
from trajstore.core.writing.inbox import Inbox
from trajstore.core.writing.options import WriterOptions
from trajstore.core.writing.points import Points
from trajstore.core.writing.publishing import Publisher, Unwritable
from trajstore.core.writing.queue import WriteQueue
from trajstore.core.writing.rewriting import Rewriter
from trajstore.errors import (
    CorruptStoreError,
    StoreLockedError,
    StoreNotFoundError,
    StoreWriteError,
    TrajstoreError,
    UnwritableTrajectoryError,
    WriterFencedError,
    written,
)

logger = logging.getLogger(__name__)

_TRIED_AGAIN = "; they are kept in memory and tried again"


class StoreWriter:
    """Adds trajectories to a directory and evicts them. Safe to call from several threads.

    Args:
        directory: where to write; created if absent, continued if it holds a store.
        trajectory_format: how new shards are written.
        options: threads and memory.
        listener: told by a pool thread of each commit and eviction, before ``flush`` learns of it.
        on_commit: called with the ids of each commit by a thread of its own, after ``flush`` could learn of it.

    Attributes:
        queue: takes what is to be written, and tells what is committed.
        log: evicts, and has the catalog.
        points: snapshots: saved points, pins, and heads that were left.
        inbox: values that other processes have for trajectories.
        rewriter: gives back the space of shards that are partly alive.

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
        listener: CommitListener,
        on_commit: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.directory = directory
        self._listener = listener
        self._format = trajectory_format
        self._pid = os.getpid()
        with written(": cannot be written; to read it use load_checkpoint"):
            self._lock = directory.lock_writer()
        try:
            self.log = CommitLog(directory, trajectory_format.name, options.snapshot_bytes, listener)
            self.inbox = Inbox(self.log)
            self.points = Points(self.log, self.inbox)
            self.inbox.look()
        except BaseException as error:
            try:  # corruption here may mean that another writer took the store over meanwhile
                if isinstance(error, CorruptStoreError | StoreNotFoundError):
                    directory.confirm()
            finally:
                self._lock.release()
            raise
        catalog = self.log.catalog
        self.queue = WriteQueue(directory.url, options, catalog.next_id, catalog.next_shard, self._check_process)
        self._callbacks = None if on_commit is None else CommitCallbacks(on_commit, directory.url)
        self._close_lock = locks.lock("StoreWriter._close_lock")
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"trajstore-writer-{i}", daemon=True)
            for i in range(options.threads)
        ]
        self.rewriter = Rewriter(directory, self.log, trajectory_format, options.shard_bytes, self.queue.new_shard)
        self._threads.append(threading.Thread(target=self._rewrite, name="trajstore-rewriter", daemon=True))
        self._threads.append(threading.Thread(target=self.inbox.run, name="trajstore-inbox", daemon=True))

    def start(self) -> None:
        """Start the threads. Only now is there somebody besides the caller who holds this object."""
        for thread in self._threads:
            start_thread(thread)

    def _check_process(self) -> None:
        check_process(self._pid, self.directory.url)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything submitted before survives SIGKILL and power loss.

        A write that failed earlier is tried again first.

        Raises:
            StoreWriteError: it failed (again); names the file.
            UnwritableTrajectoryError: trajectories could not be written for their own sake; all others are on disk.
            StoreClosedError: the writer belongs to the parent process.
            TimeoutError: ``timeout`` seconds passed.
        """
        self._check_process()
        target = self.queue.begin_flush()
        if target >= 0 and not self.queue.wait(target, timeout):
            raise TimeoutError(f"{self.directory.url}: not everything was written within {timeout} s")
        try:
            self.directory.check()
        except WriterFencedError:
            raise
        except (OSError, StoreLockedError) as error:
            raise StoreWriteError(f"{error}; what was flushed before is where the directory is now") from error
        if self.log.must_keep_house or self._listener.to_evict():
            uninterrupted(self.log.keep_house)
        if self.log.renewal_due:
            uninterrupted(self.log.renew_metadata)
        self.queue.tell_untold()

    def annotate(self, said: Said, rows: Rows) -> None:
        """Give trajectories values, after all that others had for them before.

        Args:
            said: values of each trajectory.
            rows: values by row, a tensor for each trajectory.

        Raises:
            ConfigurationError: rows do not fit their trajectories; or, as the others, see :meth:`CommitLog.annotate`.
            TrajectoryUnavailableError, StoreWriteError, StoreClosedError: nothing was given to any.
        """
        self._check_process()
        self.inbox.look()
        if not rows:
            self.log.annotate(said)
            return
        with self.log.standing_still() as catalog:
            extents, kinds = catalog.extents_of(said.ids)
            known = dict(catalog.notes.kinds)
        content = content_of_rows(rows, said.ids, extents, kinds, known)
        number = self.queue.new_shard()
        files, manifest = encoded_shard(self._format, shard_name(number), content)
        said = replace(said, rows=RowShard(number, manifest, tuple(content.extents)))
        with self.log.standing_still() as catalog:
            catalog.notes.check(said)  # before anything is written
        with written(": nothing was given to the trajectories"):
            self.directory.publish(files)
        with self.log.recording(manifest):
            self.log.annotate(said)

    def retain(self) -> None:
        """Evict what retention wants evicted; a failure is logged, and tried again by the next commit or flush."""
        try:
            uninterrupted(self.log.keep_house)
        except StoreWriteError as error:
            logger.warning("%s: retention could not be applied: %s", self.directory.url, error)

    def compact(self) -> None:
        """Rewrite shards until no row of them is dead and no two small ones are left.

        Raises:
            StoreWriteError: it could not be written; the store is as it was.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self.flush()
        with written(": a shard could not be rewritten; nothing was moved"):
            try:
                while self.rewriter.step(everything=True):
                    pass
            except CorruptStoreError:
                self.directory.confirm()  # files may be gone because another writer has taken the store over
                raise

    def _rewrite(self) -> None:
        _yield_to_callers()
        self.rewriter.run()

    # -- the pool ---------------------------------------------------------------------------------

    def _work(self) -> None:
        _yield_to_callers()
        publisher = Publisher(self.directory, self._format, self.queue.new_shard)
        while True:
            try:
                group = self.queue.next_group(self.log.renew_metadata)
            except Exception:  # out of memory, if ever; without its threads the queue would stand still
                logger.exception("writing %s", self.directory.url)
                time.sleep(0.1)
                continue
            if group is None:
                return
            try:
                self._publish(group, publisher)
            except Exception as error:  # whatever went wrong must reach the caller, not end a thread unseen
                self._fail([group], error)
            else:
                self.queue.published(group)
                self._commit_ready()
                self.log.renew_metadata()
            del group  # not to be kept alive while there is nothing to do

    def _publish(self, group: Group, publisher: Publisher) -> None:
        """Make a group's files durable; what cannot be written for its own sake leaves the group."""
        if group.is_published:
            return  # an earlier attempt did; only the log failed
        group.parts, unwritable = publisher.publish(group.parts, group.failures)
        self._set_aside(group, unwritable)

    def _set_aside(self, group: Group, unwritable: Sequence[Unwritable]) -> None:
        if not unwritable:
            return
        ids = [number for item in unwritable for number in item.ids]
        first = unwritable[0]
        error = UnwritableTrajectoryError(
            f"{self.directory.url}: trajectories {ids} cannot be written and were left out; the others went on. "
            f"{type(first.error).__name__}: {first.error}",
            ids,
        )
        error.__cause__ = first.error
        logger.error("%s", error)
        self.queue.reject(group, error, sum(item.nbytes for item in unwritable))
        try:
            self._listener.rejected(ids)
        except Exception:  # whoever listens must not stop what is written
            logger.exception("%s: trajectories %s are still shown", self.directory.url, ids)

    def _commit_ready(self) -> None:
        """Commit all groups whose turn it is; if an earlier one is not published yet, that one's thread does it."""
        with self.log.turn() as turn:
            groups = self.queue.take_ready()
            while groups:
                try:
                    committed = self._commit(turn, groups)
                except Exception as error:  # as above
                    self._fail(groups, error)
                    return
                failure = self._keep_house(turn)
                overcome = self.queue.finish(committed)
                if overcome:
                    logger.warning("%s: written after all; %d attempts had failed", self.directory.url, overcome)
                if failure is not None:
                    self.queue.tell(failure)
                self.rewriter.note()
                if self._callbacks is not None:
                    for group in committed:
                        if group.parts:
                            self._callbacks.put(tuple(group.ids))
                groups = groups[len(committed) :]

    def _commit(self, turn: Turn, groups: list[Group]) -> list[Group]:
        """Commit groups, at least the first one; return those that are done with.

        Raises:
            StoreWriteError: the log could not be written.
            MemoryError: there is none.
        """
        try:
            turn.commit([group.parts for group in groups if group.parts])
        except (TrajstoreError, MemoryError, OSError):
            raise
        except Exception as error:  # whatever it is, it must not stop what comes behind
            if len(groups) > 1:
                return self._commit(turn, groups[:1])
            (group,) = groups
            self._set_aside(group, [Unwritable(group.ids, group.nbytes, error)])
            group.parts = []
        return groups

    def _keep_house(self, turn: Turn) -> StoreWriteError | None:
        """Evict and take a snapshot if it is time; return what went wrong. The commit itself stands.

        It is tried again by ``flush`` and after the next commit.
        """
        try:
            turn.keep_house()
        except StoreWriteError as error:
            logger.warning("%s", error)
            return error
        except Exception as error:  # as above
            logger.exception("after a commit to %s", self.directory.url)
            return StoreWriteError(f"{error}: retention could not be applied or the index not be written")
        return None

    def _fail(self, groups: list[Group], error: Exception) -> None:
        if isinstance(error, StoreWriteError):
            failure = error
        else:
            ids = self.queue.pending_ids
            failure = StoreWriteError(
                f"{error or repr(error)}: {len(ids):,} trajectories from id {min(ids, default=-1)} on are not on disk"
                f"{_TRIED_AGAIN}"
            )
            failure.__cause__ = error
        # An error of the disk says all that there is to say; others are bugs, and need the place.
        trace = None if isinstance(error, OSError | TrajstoreError) else error
        logger.warning("writing %s failed: %s", self.directory.url, failure, exc_info=trace)
        self.queue.fail(groups, failure)

    def is_own_thread(self) -> bool:
        """Return whether the caller is one of the pool's threads, which cannot wait for themselves."""
        return threading.current_thread() in self._threads

    # -- the end ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has come to its end, or need not."""
        return self._closed or os.getpid() != self._pid

    def close(self) -> None:
        """Flush, write a snapshot, stop the threads and give the lock back. Closing again does nothing.

        An interrupt ends the waiting for it; the closing itself goes on.

        Raises:
            StoreWriteError: something did not reach the disk; the writer is closed all the same.
        """
        if not self.closed:
            uninterrupted(self._close)

    def _close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self.rewriter.stop()
            self.inbox.stop()
            failure = self._try(self.flush)
            self.inbox.look()
            if failure is None or isinstance(failure, UnwritableTrajectoryError):
                failure = self._try(self.log.snapshot) or failure
            self.queue.close()
            for thread in self._threads:
                if thread.ident is not None:  # an interrupt may have come before it was started
                    thread.join()
            self.log.close()
            self.rewriter.wait()
            self._lock.release()
            self._closed = True
        if self._callbacks is not None:
            self._callbacks.close()
        lost = self.queue.pending_ids
        if lost:
            kind = WriterFencedError if isinstance(failure, WriterFencedError) else StoreWriteError
            what = str(failure).removesuffix(_TRIED_AGAIN)
            raise kind(
                f"{what}; the store was closed, and {len(lost):,} trajectories from id {min(lost)} on are lost"
            ) from failure
        if failure is not None:
            raise failure

    def _try(self, call: Callable[[], None]) -> StoreWriteError | None:
        try:
            call()
        except StoreWriteError as error:
            return error
        return None


def _yield_to_callers() -> None:
    """Lower this thread's priority a little: whoever adds and trains goes first when cores are scarce."""
    with contextlib.suppress(OSError, AttributeError):  # a matter of Linux; elsewhere nothing is lost
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))
