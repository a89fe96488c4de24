"""Atomic creation of folders: made under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path

from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.files.descriptors import Descriptor
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.holder import LOCK_NAME
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import CorruptStoreError, StoreLockedError

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h

_KEPT = 200
"""Longest name in bytes that temporary names repeat; with their ends they have at most 255."""


@contextmanager
def publish_folder(path: Path, *, replace: bool = True) -> Iterator[LocalDirectory]:
    """Yield an empty directory that becomes the folder at ``path``, durably, once the block ends without an error.

    An existing folder at ``path`` is exchanged atomically and then removed. A killed process leaves only a temporary
    folder, which the next call for the same path removes.

    Args:
        path: of the folder; if it is a symbolic link, its target is replaced.
        replace: False refuses a folder that has contents by then, and one that another process makes.

    Raises:
        StoreLockedError: another process publishes to ``path`` without replacing; names it.
        OSError, CorruptStoreError: those of the block, or writing failed; an existing folder at ``path`` is unchanged.
            The message names ``path``, not the temporary folder.
    """
    where = Path(os.path.realpath(path))
    if os.path.ismount(where):
        raise OSError(errno.EBUSY, "a mount point cannot be replaced; choose a folder in it", str(path))
    parent = HeldFolder(where.parent)
    parent.make()
    _remove_abandoned(parent, where.name)
    with ExitStack() as claim:
        if not replace:
            name = hidden(where.name, ".claim.tmp")
            claim.enter_context(claimed(LocalDirectory(where.parent / name, root=parent.inner(name)), path))
            claim.callback(_remove, parent, name)
        temporary = hidden(where.name, f".{uuid.uuid4().hex}.tmp")
        try:
            parent.make_folder(temporary)
            staged = LocalDirectory(where.parent / temporary, root=parent.inner(temporary), staged=True)
            # Locked while it is being made: another process that publishes to the same path leaves it alone.
            with _held(parent, temporary):
                staged.create()
                yield staged
                staged.sync_staged()
                if replace:
                    _swap_in(parent, temporary, where.name)
                else:
                    parent.rename(temporary, where.name)  # the target is absent or an empty folder
                    parent.sync()
        except (OSError, CorruptStoreError) as error:
            error.args = tuple(
                part.replace(temporary, where.name) if isinstance(part, str) else part for part in error.args
            )
            if isinstance(error, OSError) and error.filename is not None:
                error.filename = str(error.filename).replace(temporary, where.name)
            raise
        finally:
            _remove(parent, temporary)


@contextmanager
def claimed(folder: LocalDirectory, target: Path) -> Iterator[None]:
    """Hold a folder's lock, so that no other process makes the same target.

    Raises:
        StoreLockedError: another process does; names it.
    """
    folder.create()
    try:
        lock = folder.lock_writer()
    except StoreLockedError as error:
        text = str(error).replace(folder.url, str(target)).partition(";")[0]
        raise StoreLockedError(f"{text}; wait for it, or name another target") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.remove([LOCK_NAME])
        lock.release()


def hidden(name: str, end: str) -> str:
    """Return a hidden name beside a folder: of its name, or of its digest if that would be too long."""
    encoded = os.fsencode(name)
    return f".{name if len(encoded) <= _KEPT else blake2b(encoded, digest_size=16).hexdigest()}{end}"


def _swap_in(parent: HeldFolder, temporary: str, name: str) -> None:
    """Move a finished folder to its name atomically; an earlier folder ends up under the temporary name.

    Where the system cannot exchange folders, the earlier one is absent between two renames.
    """
    aside = None
    if parent.has_folder(name) and exchange(parent, temporary, name):
        try:
            parent.sync()
        except OSError:
            exchange(parent, temporary, name)
            raise
        return
    try:
        parent.rename(temporary, name)  # the target is absent or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        aside = hidden(name, f".{uuid.uuid4().hex}.old")
        _step_aside(parent, name, aside)
        try:
            parent.rename(temporary, name)
        except OSError:
            parent.rename(aside, name)
            raise
    parent.sync()
    if aside is not None:
        _remove(parent, aside)


def _remove(parent: HeldFolder, name: str) -> None:
    """Remove an unneeded folder. An interrupt within ``rmtree`` would close a descriptor twice."""
    uninterrupted(partial(shutil.rmtree, name, ignore_errors=True, dir_fd=parent.number))


def _step_aside(parent: HeldFolder, name: str, aside: str) -> None:
    try:
        parent.rename(name, aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise OSError(
            errno.EXDEV,
            "this folder of a lower layer cannot be replaced by its overlay file system; choose another path, "
            "or delete the folder first",
            name,
        ) from error


def exchange(parent: HeldFolder, one: str, other: str) -> bool:
    """Exchange two names in a folder atomically; return False where one is absent or the system call is."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(parent.number, os.fsencode(one), parent.number, os.fsencode(other), _EXCHANGE) == 0)


@contextmanager
def _held(parent: HeldFolder, name: str) -> Iterator[None]:
    descriptor = Descriptor(parent.open_folder(name), of_process=True)
    try:
        with contextlib.suppress(OSError):  # file systems without locks on folders
            fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        descriptor.close()


def _remove_abandoned(parent: HeldFolder, name: str) -> None:
    """Remove temporary folders that killed processes left for this name."""
    with os.scandir(parent.number) as entries:
        names = [entry.name for entry in entries]
    left = [one for one in names if one.startswith(hidden(name, ".")) and one.endswith(".tmp")]
    for folder in left:
        try:
            descriptor = parent.open_folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # a live process is making it
        except OSError:
            pass  # file systems without locks on folders: the last process wins
        finally:
            os.close(descriptor)
        _remove(parent, folder)
