"""The writer lock and reader leases of a local directory; both end with their process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import uuid
import weakref

import orjson

from trajstore._core.base import locks
from trajstore._core.files.base import FULL, Reader, ReaderLease, WriterLock
from trajstore._core.files.descriptors import Descriptor
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.holder import LOCK_NAME, describe_holder, holder_document, may_be_brief
from trajstore._core.files.leases import LEASE_DIGITS, READERS_FOLDER, lease_head, reader_of
from trajstore.errors import CorruptStoreError, StoreLockedError

logger = logging.getLogger(__name__)


class LocalWriterLock(WriterLock):
    """Two flocks: on the directory itself, which cannot be replaced, and on a file that names the holder.

    The file also excludes older versions of trajstore, which lock it only. Network file systems without locks on
    directories use the file alone.

    Args:
        root: the directory.
        brief: it is held for a moment only.

    Raises:
        StoreLockedError: another process holds one of them; names process, host and time.
    """

    def __init__(self, root: HeldFolder, *, brief: bool = False) -> None:
        self._root, self._brief = root, brief
        self._mutex = locks.lock("LocalWriterLock._mutex")
        self._folder = Descriptor(root.open_folder(), of_process=True)
        try:
            fcntl.flock(self._folder.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._folder.close()
            raise self._refusal() from None
        except OSError as error:
            logger.debug("%s: directories cannot be locked here: %s", root.path, error)
        try:
            self._file = self._take_file(os.O_CREAT)
        except BaseException:
            self._folder.close()
            raise

    def _take_file(self, flags: int) -> Descriptor:
        file = Descriptor(self._root.open(LOCK_NAME, os.O_RDWR | flags), of_process=True)
        try:
            with self._root.naming(LOCK_NAME):
                fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(file.number, 0)
                try:
                    os.pwrite(file.number, orjson.dumps(holder_document(brief=self._brief)), 0)
                except OSError as error:
                    if error.errno not in FULL:  # only its text is missing: a writer on a full disk may want to evict
                        raise
                    logger.warning(
                        "%s/%s could not be written, so other writers cannot name this one: %s",
                        self._root.path,
                        LOCK_NAME,
                        error.strerror,
                    )
                status = os.fstat(file.number)
        except BlockingIOError:
            file.close()
            raise self._refusal() from None
        except BaseException:
            file.close()
            raise
        self._identity = status.st_dev, status.st_ino
        return file

    def _refusal(self) -> StoreLockedError:
        holder = b""
        with contextlib.suppress(OSError), self._root.opened(LOCK_NAME, os.O_RDONLY) as descriptor:
            holder = os.pread(descriptor, 4096, 0)
        return StoreLockedError(
            f"{self._root.path} is being written by {describe_holder(holder)}; "
            "change it from there, close that writer, open the directory for reading, or record to a directory per "
            "process: rank_0, rank_1, ... in one folder, which is read as one store",
            brief=may_be_brief(holder),
        )

    def check(self) -> None:
        """Check that both locks are still held; recreate and lock a removed lock file.

        Raises:
            StoreLockedError: the file was replaced, so another process may have written meanwhile.
        """
        with self._mutex:
            if not self._file.is_open:
                return
            try:
                status = self._root.stat(LOCK_NAME)
            except FileNotFoundError:
                self._root.check()  # without the directory there is nothing to lock
                self._take_again()
                return
            if (status.st_dev, status.st_ino) != self._identity:
                raise self._lost()

    def _take_again(self) -> None:
        try:
            file = self._take_file(os.O_CREAT | os.O_EXCL)
        except (FileExistsError, StoreLockedError):
            raise self._lost() from None
        except OSError:
            with contextlib.suppress(OSError):
                self._root.unlink(LOCK_NAME)  # else the next attempt would see another writer's file
            raise
        self._file.close()
        self._file = file
        logger.warning(
            "%s was removed while its writer was running, and was made again; do not remove it",
            self._root.path / LOCK_NAME,
        )

    def _lost(self) -> StoreLockedError:
        return StoreLockedError(
            f"{self._root.path / LOCK_NAME} was replaced while this writer held it: another program may have "
            "written there; close this writer and open the directory again"
        )

    def release(self) -> None:
        with self._mutex:
            if not self._file.is_open:
                return  # released, or in a forked child, which never held it
            with contextlib.suppress(OSError):  # only the text; the flock is the lock
                os.ftruncate(self._file.number, 0)
            for held in (self._file, self._folder):
                with contextlib.suppress(OSError):  # not every file system locks folders
                    fcntl.flock(held.number, fcntl.LOCK_UN)  # a child between fork and exec may have it open
                held.close()


class LocalReaderLease(ReaderLease):
    """A file that names the generation in use, under an flock that ends with the reader.

    ``leases`` defines its text. An empty file is a reader that looks for its first generation and may read any. A
    forked child reads under its parent's lease, as long as the parent lives and keeps it.
    """

    def __init__(self, root: HeldFolder, generation: int) -> None:
        self._root = root
        self._told = False
        root.make_folder(READERS_FOLDER, shared=True)  # the first reader may be another user than the writer
        while True:
            self._name = f"{READERS_FOLDER}/{uuid.uuid4()}.pin"
            self._file = Descriptor(root.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL), of_process=True)
            fcntl.flock(self._file.number, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                os.fchmod(self._file.number, 0o644)  # independent of the umask: the writer probes the lock
            try:
                root.stat(self._name)
            except FileNotFoundError:  # the writer removed it as a dead reader's before it was locked
                self._file.close()
                continue
            break
        self._holder = orjson.dumps(holder_document())
        self._write(lease_head(generation, looking=True) + self._holder, 0)
        _leases.add(self)

    def look(self) -> None:
        self._write(b"+", LEASE_DIGITS)

    def settle(self, generation: int) -> None:
        self._write(lease_head(generation, looking=False) + self._holder, 0)

    def _write(self, text: bytes, offset: int) -> None:
        """Write a part of the text; where that fails, leave an empty file, which protects everything.

        Raises:
            OSError: neither can be done, so the file still names what it named before.
        """
        if not self._file.is_open:
            return
        try:
            os.pwrite(self._file.number, text, offset)
        except OSError as error:  # a full disk
            os.ftruncate(self._file.number, 0)
            if not self._told:
                self._told = True
                logger.warning(
                    "%s/%s could not be written for this reader, so evicted trajectories keep their space "
                    "meanwhile: %s",
                    self._root.path,
                    self._name,
                    error.strerror,
                )

    def release(self) -> None:
        if self._file.is_open:
            with contextlib.suppress(OSError):
                self._root.unlink(self._name)
            self._file.close()


_leases: weakref.WeakSet[LocalReaderLease] = weakref.WeakSet()
"""Leases to release when the interpreter exits: a program need not close its readers."""


def _release_all() -> None:
    for lease in list(_leases):
        lease.release()


os.register_at_fork(after_in_child=_leases.clear)
atexit.register(_release_all)


def read_lease(root: HeldFolder, name: str, tidy: bool) -> Reader | None:
    """Return a lease's reader if it is alive; with ``tidy``, remove the lease of a dead one."""
    try:
        with root.opened(name, os.O_RDONLY) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # conflicts with the reader's exclusive lock
            except BlockingIOError:
                return reader_of(name, os.pread(descriptor, 4096, 0))
            if tidy:
                root.unlink(name)
    except (FileNotFoundError, CorruptStoreError):  # gone, or a pipe or folder, which is not a lease
        pass
    return None
