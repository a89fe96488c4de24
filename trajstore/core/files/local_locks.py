"""Who uses a local directory: the lock of its one writer, and what its readers announce; both end with a process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import uuid

import orjson

from trajstore.core.base import locks
from trajstore.core.files.base import FULL, Reader, ReaderLease, WriterLock
from trajstore.core.files.descriptors import Descriptor
from trajstore.core.files.held import HeldFolder
from trajstore.core.files.holder import LOCK_NAME, describe_holder, holder_document
from trajstore.core.files.leases import LEASE_DIGITS, READERS_FOLDER, lease_head, reader_of
from trajstore.errors import CorruptStoreError, StoreLockedError

logger = logging.getLogger(__name__)


class LocalWriterLock(WriterLock):
    """Two flocks: of the directory itself, which nobody can take away, and of a file, which says who holds it.

    Versions of trajstore that lock the file only are kept out by it, and keep others out. Network file systems that
    lock no directories leave the file alone to do it.

    Raises:
        StoreLockedError: somebody else holds one of them; names process, host and time.
    """

    def __init__(self, root: HeldFolder) -> None:
        self._root = root
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
                    os.pwrite(file.number, orjson.dumps(holder_document()), 0)
                except OSError as error:
                    if error.errno not in FULL:  # its text only: whoever opens a full disk may want to evict
                        raise
                    logger.warning("%s/%s cannot say who writes here: %s", self._root.path, LOCK_NAME, error.strerror)
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
            "close that writer, or open the directory for reading"
        )

    def check(self) -> None:
        """Return if both locks are held still. A lock's file that somebody has removed is made and locked again.

        Raises:
            StoreLockedError: the file was replaced, so somebody else may have written meanwhile.
        """
        with self._mutex:
            if not self._file.is_open:
                return
            try:
                found = self._root.stat(LOCK_NAME)
            except FileNotFoundError:
                self._root.check()  # with the directory gone there is nothing to lock
                self._take_again()
                return
            if (found.st_dev, found.st_ino) != self._identity:
                raise self._lost()

    def _take_again(self) -> None:
        try:
            file = self._take_file(os.O_CREAT | os.O_EXCL)
        except (FileExistsError, StoreLockedError):
            raise self._lost() from None
        except OSError:
            with contextlib.suppress(OSError):
                self._root.unlink(LOCK_NAME)  # else the next attempt would take it for somebody else's
            raise
        self._file.close()
        self._file = file
        logger.warning(
            "%s was removed under its writer, and was made again; nobody may remove it",
            self._root.path / LOCK_NAME,
        )

    def _lost(self) -> StoreLockedError:
        return StoreLockedError(
            f"{self._root.path / LOCK_NAME} was replaced while this writer held it: somebody else may have written "
            "there; close this writer and open the directory again"
        )

    def release(self) -> None:
        with self._mutex:
            if not self._file.is_open:
                return  # released, or in a forked child, which never held it
            with contextlib.suppress(OSError):  # its text only; what counts is the flock
                os.ftruncate(self._file.number, 0)
            for held in (self._file, self._folder):
                with contextlib.suppress(OSError):  # not every file system locks folders
                    fcntl.flock(held.number, fcntl.LOCK_UN)  # a child between fork and exec may have it open
                held.close()


class LocalReaderLease(ReaderLease):
    """A file that says what is being read, under an flock that ends with the reader.

    Its text is that of ``leases``. An empty file is one that is looking for its first generation, and may read any. A
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
                os.fchmod(self._file.number, 0o644)  # whatever the umask: the writer looks whether it is locked
            try:
                root.stat(self._name)
            except FileNotFoundError:  # the writer took it for a dead reader's before it was locked
                self._file.close()
                continue
            break
        self._write(lease_head(generation, looking=True) + orjson.dumps(holder_document()), 0)

    def look(self) -> None:
        self._write(b"+", LEASE_DIGITS)

    def settle(self, generation: int) -> None:
        self._write(lease_head(generation, looking=False), 0)

    def _write(self, text: bytes, offset: int) -> None:
        if self._file.is_open:
            try:
                os.pwrite(self._file.number, text, offset)
            except OSError as error:  # no room for a new file's text: an empty one holds everything
                if not self._told:
                    self._told = True
                    logger.warning(
                        "%s/%s cannot say what is read here, so evicted trajectories keep their space meanwhile: %s",
                        self._root.path,
                        self._name,
                        error.strerror,
                    )

    def release(self) -> None:
        if self._file.is_open:
            with contextlib.suppress(OSError):
                self._root.unlink(self._name)
            self._file.close()


def read_lease(root: HeldFolder, name: str, tidy: bool) -> Reader | None:
    """Return the live reader that a lease is of; that of a dead one is removed if it is to be tidied."""
    try:
        with root.opened(name, os.O_RDONLY) as descriptor:
            try:
                fcntl.flock(
                    descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB
                )  # enough to meet the reader's, which is exclusive
            except BlockingIOError:
                return reader_of(name, os.pread(descriptor, 4096, 0))
            if tidy:
                root.unlink(name)
    except (FileNotFoundError, CorruptStoreError):  # gone, or a pipe or folder, which no reader has made
        pass
    return None
