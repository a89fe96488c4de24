"""The one writer of a directory: a thread pool between the queue of what was added and the commit log.

The way of a group: taken from the queue by a pool thread, encoded, published (files durable), then, in
the order of ids, recorded in the log (one append for all groups that are ready), then visible. What a
crash leaves at each point is written in docs/design/store.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from trajstore.commit_log import CommitListener, CommitLog, check_process
from trajstore.errors import StoreLockedError, StoreWriteError
from trajstore.formats.base import ShardManifest, TrajectoryFormat
from trajstore.manifest import manifest_of
from trajstore.pending import Scratch, content_of
from trajstore.shards import shard_name
from trajstore.storage import Directory
from trajstore.write_queue import Group, WriteQueue, WriterOptions

logger = logging.getLogger(__name__)


class StoreWriter:
    """Adds trajectories to a directory and evicts them. Safe to call from several threads.

    Args:
        directory: where to write; created if absent, continued if it holds a store.
        trajectory_format: how new shards are written.
        options: threads and memory.
        listener: told by a pool thread of each commit and eviction, before ``flush`` learns of it.

    Attributes:
        queue: takes what is to be written, and tells what is committed.
        log: evicts, pins, and has the catalog.

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
    ) -> None:
        self.directory = directory
        self.options = options
        self._format = trajectory_format
        self._pid = os.getpid()
        try:
            self._lock = directory.lock_writer()
        except OSError as error:
            raise StoreWriteError(f"{error}: cannot be written; to read it use load_checkpoint") from error
        try:
            self.log = CommitLog(directory, trajectory_format.name, options.snapshot_bytes, listener)
        except BaseException:
            self._lock.release()
            raise
        catalog = self.log.catalog
        self.queue = WriteQueue(directory.url, options, catalog.next_id, catalog.next_shard, self._check_process)
        self._threads = [
            threading.Thread(target=self._work, name=f"trajstore-writer-{i}", daemon=True)
            for i in range(options.threads)
        ]
        for thread in self._threads:
            thread.start()

    def _check_process(self) -> None:
        check_process(self._pid, self.directory.url)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything submitted before survives SIGKILL and power loss.

        A write that failed earlier is tried again first.

        Raises:
            StoreWriteError: it failed (again); names the file.
            StoreClosedError: the writer belongs to the parent process.
            TimeoutError: ``timeout`` seconds passed.
        """
        self._check_process()
        target = self.queue.begin_flush()
        if target >= 0 and not self.queue.wait(target, timeout):
            raise TimeoutError(f"{self.directory.url}: not everything was written within {timeout} s")
        try:
            self.directory.check()
        except (OSError, StoreLockedError) as error:
            raise StoreWriteError(f"{error}; what was flushed before is where the directory is now") from error
        if self.log.unsettled:
            with self.log.lock:
                self.log.keep_house()

    # -- the pool ---------------------------------------------------------------------------------

    def _work(self) -> None:
        _yield_to_callers()
        scratch = Scratch()
        while (group := self.queue.next_group()) is not None:
            try:
                if group.manifest is None:
                    group.manifest = self._publish(group, scratch)
            except Exception as error:  # whatever went wrong must reach the caller, not end a thread unseen
                self._fail([group], error)
            else:
                self.queue.published(group)
                self._commit_ready()

    def _publish(self, group: Group, scratch: Scratch) -> ShardManifest:
        name = shard_name(group.shard)
        content = content_of(group.owned, scratch)
        encoded = self._format.encode(name, content)
        self.directory.publish(encoded.files)
        return manifest_of(encoded, self._format.name, name, content)

    def _commit_ready(self) -> None:
        """Record all groups whose turn it is; if an earlier one is missing, that one's thread does it."""
        with self.log.lock:
            groups = self.queue.take_ready()
            if not groups:
                return
            try:
                self.log.record([group.new_shard() for group in groups])
            except Exception as error:  # as above
                self._fail(groups, error)
                return
            failure = self._keep_house()
            self.queue.finish(groups)
            if failure is not None:
                self.queue.tell(failure)

    def _keep_house(self) -> StoreWriteError | None:
        """Evict and take a snapshot if it is time; return what went wrong. The commit itself stands.

        It is tried again by ``flush`` and after the next commit.
        """
        try:
            self.log.keep_house()
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
            count = sum(len(group.ids) for group in groups)
            failure = StoreWriteError(
                f"{error}: {count} trajectories from id {groups[0].ids[0]} on are not on disk; "
                "they are kept in memory and flush() tries again"
            )
            failure.__cause__ = error
        logger.error("writing %s failed: %s", self.directory.url, error, exc_info=error)
        self.queue.fail(groups, failure)

    def is_own_thread(self) -> bool:
        """Return whether the caller is one of the pool's threads, which cannot wait for themselves."""
        return threading.current_thread() in self._threads

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, write a snapshot, stop the threads and give the lock back. Closing again does nothing.

        Raises:
            StoreWriteError: something did not reach the disk; the writer is closed all the same.
        """
        if os.getpid() != self._pid or self.queue.closing:
            return
        try:
            self.flush()
            self.log.snapshot()
        finally:
            self.queue.close()
            for thread in self._threads:
                thread.join()
            self.log.close()
            self._lock.release()


def _yield_to_callers() -> None:
    """Lower this thread's priority a little: whoever adds and trains goes first when cores are scarce."""
    with contextlib.suppress(OSError, AttributeError):  # a matter of Linux; elsewhere nothing is lost
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))
