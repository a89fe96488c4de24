"""The single writer of a directory: a thread pool between the queue of additions and the commit log.

A pool thread takes a group from the queue, encodes and publishes it (files durable). Groups are then committed in the
order of ids (one append for all that are ready) and become visible. docs/design/store.md describes the state after a
crash at each point. Groups are encoded and published without a lock, and committed with ``CommitLog._lock`` held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trajstore._core.base import locks
from trajstore._core.base.interrupts import start_thread, uninterrupted
from trajstore._core.files.base import Directory
from trajstore._core.formats.base import TrajectoryFormat
from trajstore._core.formats.checksums import encoded_shard
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.row_notes import Rows, RowShard, content_of_rows
from trajstore._core.store.shard_table import shard_name
from trajstore._core.writing.callbacks import CommitCallbacks
from trajstore._core.writing.commit_log import CommitLog, check_process
from trajstore._core.writing.commits import CommitListener
from trajstore._core.writing.groups import Group
from trajstore._core.writing.inbox import Inbox
from trajstore._core.writing.opening import lock_store
from trajstore._core.writing.options import WriterOptions
from trajstore._core.writing.points import StorePoints
from trajstore._core.writing.publishing import Publisher, Unwritable
from trajstore._core.writing.queue import WriteQueue
from trajstore._core.writing.rewriting import Rewriter
from trajstore.errors import (
    CorruptStoreError,
    StoreLockedError,
    StoreNotFoundError,
    StoreWriteError,
    TrajstoreError,
    UnwritableTrajectoryError,
    WriterFencedError,
    trajectories,
    written,
)

logger = logging.getLogger(__name__)

_TRIED_AGAIN = "; they are kept in memory and retried"


class StoreWriter:
    """Adds trajectories to a directory and evicts them. Thread-safe.

    Args:
        directory: created if absent, continued if it holds a store.
        trajectory_format: format of new shards.
        once: whether new shards store equal rows of ``next_obs`` and ``curr_obs`` once; None: as those of the store.
        options: threads and memory.
        metadata: returns further values of ``metadata.json``.
        listener: called by a pool thread for each commit and eviction, before ``flush`` returns.
        compress_after: see :class:`~trajstore._core.writing.rewriting.Rewriter`.
        on_commit: called with the ids of each commit in a separate thread, possibly after ``flush`` has returned.

    Attributes:
        queue: accepts trajectories and reports commits.
        log: evicts, and has the catalog.
        points: snapshots: saved points, pins, and heads that were left.
        inbox: late values from other processes.
        rewriter: frees the space of shards that are partly alive.

    Raises:
        ConfigurationError, StoreLockedError, StoreWriteError: see :func:`lock_store`.
        CorruptStoreError, UnsupportedVersionError: the existing store cannot be continued.
    """

    def __init__(
        self,
        directory: Directory,
        trajectory_format: TrajectoryFormat,
        once: bool | None,
        options: WriterOptions,
        metadata: Callable[[], Mapping[str, Any]],
        listener: CommitListener,
        compress_after: int | None = None,
        on_commit: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.directory = directory
        self._listener = listener
        self._format = trajectory_format
        self._pid = os.getpid()
        self._check_process = partial(check_process, self._pid, directory.url)
        self._lock = lock_store(directory)
        try:
            self.log = CommitLog(directory, metadata, listener)
            self.inbox = Inbox(self.log)
            self.points = StorePoints(self.log, self.inbox)
            self.inbox.look()
        except BaseException as error:
            try:  # corruption may mean that another writer took over
                if isinstance(error, CorruptStoreError | StoreNotFoundError):
                    directory.confirm()
            finally:
                self._lock.release()
            raise
        catalog = self.log.catalog
        self._once = any(schema.stored_once for schema in catalog.shards.schemas) if once is None else once
        self.queue = WriteQueue(directory.url, options, catalog.next_id, catalog.next_shard, self._check_process)
        self._callbacks = None if on_commit is None else CommitCallbacks(on_commit, directory.url)
        self._close_lock = locks.lock("StoreWriter._close_lock")
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"trajstore-writer-{i}", daemon=True)
            for i in range(options.threads)
        ]
        self.rewriter = Rewriter(
            directory, self.log, trajectory_format, options.shard_bytes, self.queue.new_shard, compress_after
        )
        self._threads.append(threading.Thread(target=self._rewrite, name="trajstore-rewriter", daemon=True))
        self._threads.append(threading.Thread(target=self.inbox.run, name="trajstore-inbox", daemon=True))

    def start(self) -> None:
        """Start the threads, once the caller's object is complete."""
        for thread in self._threads:
            start_thread(thread)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything submitted before survives SIGKILL and power loss.

        Failed writes are retried first.

        Raises:
            StoreWriteError: writing failed (again); names the file.
            UnwritableTrajectoryError: trajectories were rejected as unwritable; all others are on disk.
            StoreClosedError: the writer belongs to the parent process.
            TimeoutError: trajectories were not written within ``timeout`` seconds, which bound no other wait.
        """
        self._check_process()
        self.log.check_not_asking()
        target = self.queue.begin_flush()
        if target >= 0 and not self.queue.wait(target, timeout):
            raise TimeoutError(f"{self.directory.url}: not everything was written within {timeout} s")
        try:
            self.directory.check()
        except WriterFencedError:
            raise
        except (OSError, StoreLockedError) as error:
            raise StoreWriteError(f"{error}; what was flushed before is where the directory is now") from error
        if self.log.must_keep_house or len(self._listener.to_evict()):
            uninterrupted(self.log.keep_house)
        if self.log.renewal_due:
            uninterrupted(self.log.renew_metadata)
        self.queue.tell_untold()

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Add late values to trajectories, after recording the inbox.

        Args:
            update: values of each trajectory.
            rows: values by row, a tensor for each trajectory.

        Raises:
            ConfigurationError: rows do not fit their trajectories; or see :meth:`CommitLog.annotate`.
            TrajectoryUnavailableError, StoreWriteError, StoreClosedError: no value was added.
        """
        self._check_process()
        self.log.check_not_asking()
        with written(": nothing was given to the trajectories"):
            self.inbox.take_in()  # earlier values must not be recorded later and replace these
        if not rows:
            self.log.annotate(update)
            return
        with self.log.standing_still() as catalog:
            extents, kinds = catalog.extents_of(update.ids)
            known = dict(catalog.notes.kinds)
        content = content_of_rows(rows, update.ids, extents, kinds, known)
        number = self.queue.new_shard()
        files, manifest = encoded_shard(self._format, shard_name(number), content, entries={})
        update = replace(update, rows=RowShard(number, manifest, content.extents))
        with self.log.standing_still() as catalog:
            catalog.notes.check(update)  # before anything is written
        with written(": nothing was given to the trajectories"):
            self.directory.publish(files)
        with self.log.recording(manifest):
            self.log.annotate(update)

    def retain(self) -> None:
        """Apply retention; a failure is logged and retried at the next commit or flush."""
        try:
            uninterrupted(self.log.keep_house)
        except StoreWriteError as error:
            logger.warning("%s: retention could not be applied: %s", self.directory.url, error)

    def compact(self, *, compress: bool) -> None:
        """Compress all shards if asked to, and rewrite them until no dead rows and no two small shards are left.

        Later additions are left alone.

        Raises:
            StoreWriteError: writing failed; the store is unchanged.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self.flush()
        below = self.log.catalog.next_id
        with written(": a shard could not be rewritten; nothing was moved"):
            try:
                while compress and self.rewriter.step(below=below, compress=0):
                    pass
                while self.rewriter.step(below=below):
                    pass
                if self.log.garbage.held_bytes:
                    self.log.collect_garbage()  # the readers may have ended
            except CorruptStoreError:
                self.directory.confirm()  # another writer may have taken over and deleted files
                raise

    def _rewrite(self) -> None:
        _yield_to_callers()
        self.rewriter.run()

    # -- the pool ---------------------------------------------------------------------------------

    def _work(self) -> None:
        _yield_to_callers()
        publisher = Publisher(self.directory, self._format, self.queue.new_shard, once=self._once)
        while True:
            try:
                group = self.queue.next_group(self.log.renew_metadata)
            except Exception:  # probably out of memory; the thread must stay alive
                logger.exception("writing %s", self.directory.url)
                time.sleep(0.1)
                continue
            if group is None:
                return
            try:
                if not group.is_published:  # else only the log failed in an earlier attempt
                    group.parts, unwritable = publisher.publish(group.parts, group.failures)
                    if unwritable:
                        self._set_aside(group, unwritable)
            except Exception as error:  # errors must reach the caller, not end the thread
                self._fail([group], error)
            else:
                self.queue.published(group)
                self._commit_ready()
                self.log.renew_metadata()
            del group  # free its memory while idle

    def _set_aside(self, group: Group, unwritable: Sequence[Unwritable]) -> None:
        """Remove unwritable trajectories from their group, with an error for the caller."""
        ids = [number for item in unwritable for number in item.ids]
        first = unwritable[0]
        error = UnwritableTrajectoryError(
            f"{self.directory.url}: trajectories {ids} cannot be written and were left out; all others are written. "
            f"{type(first.error).__name__}: {first.error}",
            ids,
        )
        error.__cause__ = first.error
        logger.error("%s", error)
        self.queue.reject(group, error, sum(item.nbytes for item in unwritable))
        try:
            self._listener.forget(ids)
        except Exception:  # a listener's error must not stop the writer
            logger.exception("%s: trajectories %s are still shown", self.directory.url, ids)

    def _commit_ready(self) -> None:
        """Commit all groups that are ready; behind an unpublished one, its thread commits them later."""
        with self.log.standing_still():
            groups = self.queue.take_ready()
            while groups:
                try:
                    committed = self._commit(groups)
                except Exception as error:  # as above
                    self._fail(groups, error)
                    return
                failure = self._keep_house()
                overcome = self.queue.finish(committed)
                if overcome:
                    logger.warning("%s: written after %d failed attempts", self.directory.url, overcome)
                if failure is not None:
                    self.queue.report(failure)
                self.rewriter.note()
                if self._callbacks is not None:
                    for group in committed:
                        if group.parts:
                            self._callbacks.put(tuple(group.ids))
                groups = groups[len(committed) :]

    def _commit(self, groups: list[Group]) -> list[Group]:
        """Commit at least the first group; return the finished groups.

        Raises:
            StoreWriteError: the log could not be written.
            MemoryError: out of memory.
        """
        try:
            self.log.commit([group.parts for group in groups if group.parts])
        except (TrajstoreError, MemoryError, OSError):
            raise
        except Exception as error:  # one bad group must not block the later ones
            if len(groups) > 1:
                return self._commit(groups[:1])
            (group,) = groups
            self._set_aside(group, [Unwritable(group.ids, group.nbytes, error)])
            group.parts = []
        return groups

    def _keep_house(self) -> StoreWriteError | None:
        """Apply retention and write a due snapshot after a commit; return the error, if any.

        A failure is retried by ``flush`` and after the next commit; the commit stays valid.
        """
        try:
            self.log.keep_house_now()
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
                f"{error or repr(error)}: not on disk: {trajectories(len(ids))} from id {min(ids, default=-1)} on"
                f"{_TRIED_AGAIN}"
            )
            failure.__cause__ = error
        # Errors of the disk need no traceback; others are bugs.
        trace = None if isinstance(error, OSError | TrajstoreError) else error
        logger.warning("writing %s failed: %s", self.directory.url, failure, exc_info=trace)
        self.queue.fail(groups, failure)

    def is_own_thread(self) -> bool:
        """Return whether the caller is a pool thread, which must not wait for the pool."""
        return threading.current_thread() in self._threads

    # -- the end ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has finished; always true in a forked child."""
        return self._closed or os.getpid() != self._pid

    def close(self) -> None:
        """Flush, write a snapshot, stop the threads and release the lock. Idempotent.

        An interrupt ends the wait; closing continues.

        Raises:
            StoreWriteError: some data did not reach the disk; the writer is closed all the same.
        """
        if not self.closed:
            self.log.check_not_asking()
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
                if thread.ident is not None:  # an interrupt may have prevented its start
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
            reason = str(failure).removesuffix(_TRIED_AGAIN)
            raise kind(
                f"{reason}; the store was closed, which loses {trajectories(len(lost))} from id {min(lost)} on"
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
    """Lower this thread's priority slightly in favour of adding and training threads."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities per thread
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))
