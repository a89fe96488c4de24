"""The thread that mirrors a store of this process. The store never waits for it.

docs/design/many-machines.md has the order of its steps, and the state that a crash leaves after each.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from trajstore._core.base import locks
from trajstore._core.base.clock import microseconds
from trajstore._core.base.interrupts import WaitList, start_thread
from trajstore._core.files.base import Directory, EncodedFile, ReaderLease
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import nested, open_directory
from trajstore._core.writing.commit_log import CommitLog
from trajstore._core.writing.opening import MIRRORED_NAME, mirror_record
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, TrajstoreError, trajectories
from trajstore.remote.mirror.options import Mirror, MirrorState
from trajstore.remote.mirror.replica import Replica, as_text
from trajstore.remote.mirror.source import Line, Picture, Tail

logger = logging.getLogger(__name__)

_ROUND_BYTES = 256 << 20  # of shards, copied between two publications while the mirror is behind
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between attempts while the mirror cannot be written; each pause is twice as long as the one before."""
_REPEATED = 600_000_000  # µs after which the warning of a lasting failure is repeated
_LONGEST_END = 5.0  # seconds that closing waits for a running request


class StoreMirror:
    """Copies a store's commits to another directory, in its own thread.

    Args:
        log: of the store.
        options: URL, storage options and intervals.
        target: the mirror's directory, see :func:`mirror_directory`.
        metadata: returns the fields of ``metadata.json`` that the catalog lacks.
    """

    def __init__(
        self, log: CommitLog, options: Mirror, target: Directory, metadata: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._log = log
        self._options = options
        self._metadata = metadata
        self._directory = log.directory
        self._target = target
        self._since: float | None = None
        self._mount: str | None = None
        self._replica = Replica(self._target, self._directory)
        self._opened = False
        self._tail = Tail(self._directory)
        self._state = MirrorState(self._target.url)
        self._told_at = 0.0
        self._warned_at = 0
        self._untold = False
        self._lock = locks.lock("StoreMirror._lock")
        self._wait_list = WaitList()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._closed = False
        self._reported = 0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="trajstore-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        start_thread(self._thread)

    # -- state and waiting ------------------------------------------------------------------------

    @property
    def state(self) -> MirrorState:
        """State of the mirror, with the error of the last attempt."""
        return self._state

    @property
    def behind(self) -> int:
        """Number of live trajectories of the store that are not on the mirror."""
        with self._log.standing_still() as catalog:
            ids = catalog.index["trajectory_id"]
            return len(ids) - int(np.searchsorted(ids, self._state.newest_id, side="right"))

    @property
    def is_level(self) -> bool:
        """Whether the mirror has all commits of the store, saved points included."""
        with self._log.standing_still():
            return self._is_level()

    def _is_level(self) -> bool:
        catalog, replica = self._log.catalog, self._replica
        if not self._opened or replica.generation != catalog.generation or replica.whole_due:
            return False
        return {name: head.crc32 for name, head in catalog.pins.heads.items()} == replica.pins

    def wait(self, newest_id: int, timeout: float | None) -> bool:
        """Wait until every trajectory up to an id is on the mirror; return False after ``timeout``."""
        return self._wait(lambda: self._state.newest_id >= newest_id, timeout)

    def wait_for_all(self, flush: Callable[[float | None], None], timeout: float | None) -> bool:
        """Wait until the mirror has all present data, saved points and rollbacks too; see :meth:`wait`.

        Args:
            flush: the store's; commits pending additions, within a timeout in seconds.
            timeout: in seconds; None = no limit.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            flush(timeout)
        except TimeoutError:
            return False
        with self._log.standing_still() as catalog:
            generation = catalog.generation
            pins = {name: head.crc32 for name, head in catalog.pins.heads.items()}

        def done() -> bool:
            with self._log.standing_still() as catalog:
                heads = catalog.pins.heads
                asked = {name: crc for name, crc in pins.items() if name in heads and heads[name].crc32 == crc}
                there = self._replica.pins
                return self._state.generation >= generation and asked.items() <= there.items()

        return self._wait(done, None if until is None else max(0.0, until - time.monotonic()))

    def _wait(self, done: Callable[[], bool], timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        self._wake.set()
        while True:
            with self._lock:
                gate = self._wait_list.gate()
            if done():
                return True
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not self._thread.is_alive():
                return False
            self._wait_list.wait(gate, left)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                left = self._step()
            except Exception as error:  # no error may stop the store or this thread
                self._failed(error)
                self._wake.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            if not left:
                self._wake.wait(self._options.interval)
        try:
            self._replica.close()
        except (OSError, TrajstoreError) as error:
            logger.warning("%s: the mirror's lock could not be released: %s", self._target.url, error)
        self._tell(self._state)

    def _failed(self, error: Exception) -> None:
        """Record the error, log it if new and every ten minutes, and start again from the mirror's state."""
        text = f"{type(error).__name__}: {error}" if not isinstance(error, TrajstoreError | OSError) else str(error)
        now = microseconds()
        if text != self._state.error or now - self._warned_at >= _REPEATED:
            self._warned_at = now
            trace = None if isinstance(error, TrajstoreError | OSError) else error
            logger.warning("%s is not mirrored at present; retrying: %s", self._directory.url, text, exc_info=trace)
        self._tell(replace(self._state, error=text, failures=self._state.failures + 1))
        self._opened = False
        try:
            self._replica.close()
        except (OSError, TrajstoreError) as again:
            logger.info("%s: %s", self._target.url, again)
        self._target = self._target.present()

    def _step(self) -> bool:
        """Advance the mirror by one step; return whether there is more to do."""
        if not self._opened:
            self._since = self._directory.writer().get("since")
            self._replica = Replica(self._target, self._directory)
            self._tail = Tail(self._directory)
            self._check_mounted()
            self._replica.open(self._log)
            self._mount = mount_of(self._target)
            self._opened = True
            generation, newest = self._replica.generation, self._replica.newest_id
            self._tell(replace(self._state, generation=generation, newest_id=newest))
            self._wake_waiters()
        if self.is_level:
            if self._state.error is not None:
                self._tell(replace(self._state, error=None, failures=0))
            elif self._untold:
                self._tell(self._state)
            self._replica.remove_dead()
            return False
        lease = ReaderLease()
        try:
            with self._log.standing_still() as catalog:
                lease = self._directory.announce_reader(catalog.generation)
                picture = self._picture(whole=self._replica.whole_due)
                lease.settle(picture.generation)
            lines = None if self._replica.whole_due else self._lines(picture)
            if picture.whole is None and lines is None:
                with self._log.standing_still():
                    picture = self._picture(whole=True)
                    lease.settle(picture.generation)
            return self._bring(picture, lines)
        finally:
            lease.release()

    def _check_mounted(self) -> None:
        """Refuse to fill an empty mount point whose disk had the mirror before.

        Raises:
            StoreError: the disk is not mounted.
        """
        record = mirror_record(self._directory) or {}
        if record.get("url") != as_text(self._target.url) or not isinstance(record["mount"], str):
            return
        self._mount = record["mount"]
        if not os.path.ismount(self._mount) and not (self._target.exists() and any(self._target.listing())):
            raise StoreError(
                f"{self._target.url}: is empty, and the disk that had the mirror is not mounted at {self._mount}; "
                f"mount it, or delete {self._directory.url}/{MIRRORED_NAME} to begin the mirror anew where it is now"
            )

    def _picture(self, *, whole: bool) -> Picture:
        return Picture.of(self._log.catalog, self._replica.pins, dict(self._metadata()) if whole else None)

    def _lines(self, picture: Picture) -> list[Line] | None:
        """Return the next records, up to a limit of shard bytes; None if the index must be written whole."""
        replica = self._replica
        lines = self._tail.lines(replica.generation, picture.generation)
        if lines is None or any(picture.pins[name].kind == "aside" for name in picture.pin_files):
            return None
        # Readers keep evicted trajectories that a pin names, so the pin must be there before the record.
        since = min([picture.pins[name].generation for name in picture.pin_files], default=picture.generation)
        if any(line.evicts and line.generation > since for line in lines):
            return None
        if replica.lacking(picture, self._log.catalog, lines) is None:
            return None
        nbytes = self._log.catalog.shards.nbytes()
        total = 0
        for place, line in enumerate(lines):
            rows = replica.lacking(picture, self._log.catalog, [line]) or []
            total += int(nbytes[rows].sum())
            if total > _ROUND_BYTES:
                return lines[: place + 1]
        return lines

    def _bring(self, picture: Picture, lines: list[Line] | None) -> bool:
        replica, catalog = self._replica, self._log.catalog
        upto = picture.generation if lines is None or not lines else lines[-1].generation
        rows = replica.lacking(picture, catalog, lines) or []
        try:
            replica.begin(catalog)
            if not replica.copy(catalog, rows, lambda: not self._stopping.is_set()):
                return True
            replica.copy_states(picture, upto)
        except (CorruptStoreError, FileNotFoundError):
            if self._moved_on(picture, rows):
                return True  # evicted meanwhile: repeat with the present state
            raise
        newest = picture.newest_id
        if lines is None:
            replica.publish_whole(picture)
        else:
            replica.publish_lines(picture, lines)
            if lines:
                self._tail.move(lines[-1])
            if upto < picture.generation:
                added = [line.newest_id for line in lines if line.newest_id is not None]
                newest = max([replica.newest_id, *added])
        replica.newest_id = newest
        self._published(newest)
        replica.tidy(picture, catalog)
        self._wake_waiters()
        return upto < picture.generation

    def _moved_on(self, picture: Picture, rows: Sequence[int]) -> bool:
        """Return whether the store no longer needs the rows that could not be read."""
        with self._log.standing_still() as catalog:
            needed = catalog.needed_shards()
            heads = catalog.pins.heads
            points = any(name not in heads or heads[name].crc32 != head.crc32 for name, head in picture.pins.items())
            return points or not needed[list(rows)].all()

    def _published(self, newest_id: int) -> None:
        replica = self._replica
        at = time.time() if replica.generation >= 0 else None
        self._tell(MirrorState(self._target.url, replica.generation, newest_id, at))
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        with self._lock:
            self._wait_list.wake()

    def _tell(self, state: MirrorState) -> None:
        """Keep the state, and write it beside the store for tools, at most once a second."""
        changed = state.error != self._state.error
        self._state = state
        now = time.monotonic()
        self._untold = not changed and now - self._told_at < 1.0 and not self._stopping.is_set()
        if self._untold:
            return
        self._told_at = now
        document = {name: getattr(state, name) for name in ("generation", "newest_id", "at")}
        document |= {"since": self._since, "mount": self._mount, "url": as_text(state.url)}
        document["error"] = state.error and as_text(state.error)
        try:
            self._directory.publish([EncodedFile(MIRRORED_NAME, [orjson.dumps(document)])])
        except (OSError, TrajstoreError) as error:
            logger.info("%s/%s could not be renewed: %s", self._directory.url, MIRRORED_NAME, error)

    # -- the end ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after :meth:`close`, and in a forked child."""
        return os.getpid() != self._pid or self._closed

    def is_own_thread(self) -> bool:
        """Return whether the caller is the copying thread, which cannot wait for itself."""
        return threading.current_thread() is self._thread

    def flush(self) -> None:
        """Copy the remaining commits and end the thread, at interpreter exit, while thread pools still exist.

        Other threads may add later; :meth:`close` reports that.
        """
        try:
            if self._thread.ident is not None and not self._wait(lambda: self.is_level, self._options.close_timeout):
                state = self._state
                why = f": {state.error}" if state.error else ""
                if state.generation < 0 and state.error:  # it could not be opened
                    remainder = f"without the mirror {state.url}; what is there is not known"
                else:
                    remainder = self._remainder()
                logger.warning("%s: closed %s%s", self._directory.url, remainder, why)
        finally:  # also on an interrupt
            self._stopping.set()
            self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_END)
        self._reported = self.behind

    def _remainder(self) -> str:
        newest = self._state.newest_id
        remainder = f"with {trajectories(self.behind, 'that is', 'that are')} not on the mirror {self._state.url}"
        return remainder + f", which has all up to id {newest}" * (newest >= 0)

    def close(self) -> None:
        """Copy the remaining commits, for at most ``close_timeout`` seconds, and end the thread.

        A warning reports anything left uncopied; the store has it.
        """
        if self.closed:
            return
        if not self._stopping.is_set():
            self.flush()
        elif self.behind > self._reported:
            logger.warning(
                "%s: closed %s: added after the main thread ended; the next writer copies the rest",
                self._directory.url,
                self._remainder(),
            )
        self._closed = True


def mount_of(directory: Directory) -> str | None:
    """Return the mount point above a local directory; None for a URL, and for a name that is no text."""
    if not isinstance(directory, LocalDirectory):
        return None
    path = os.path.realpath(directory.path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path if as_text(path) == path else None


def mirror_directory(options: Mirror, store: Directory) -> Directory:
    """Return the directory of a store's mirror.

    Raises:
        ConfigurationError: one directory is in the other, or the URL is unusable.
        MissingDependencyError: the file system's package is not installed.
    """
    target = open_directory(options.url, **options.storage_options)
    if nested(store, target):
        raise ConfigurationError(
            f"mirror {target.url}: one lies in the other of mirror and store {store.url}; mirror to another directory"
        )
    return target
