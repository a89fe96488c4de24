"""Folders that appear whole: made under another name, put in their place at one stroke."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from trajstore.core.base.interrupts import uninterrupted
from trajstore.core.files.descriptors import Descriptor
from trajstore.core.files.held import HeldFolder
from trajstore.core.files.local import LocalDirectory

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h


@contextmanager
def publish_folder(path: Path) -> Iterator[LocalDirectory]:
    """Yield an empty directory that stands at ``path``, durably, once the block has ended without an error.

    What stood there before is exchanged for it at one stroke, and is gone then. Nobody sees a part of it, whenever the
    process is killed; what it was making is removed by the next one that publishes to the same path.

    Args:
        path: of the folder; if it is a symbolic link, the folder behind it is replaced.

    Raises:
        OSError: something could not be written; what was at ``path`` before is still there.
    """
    where = Path(os.path.realpath(path))
    parent = HeldFolder(where.parent)
    parent.make()
    _remove_abandoned(parent, where.name)
    temporary = f".{where.name}.{uuid.uuid4().hex}.tmp"
    parent.make_folder(temporary)
    staged = LocalDirectory(where.parent / temporary, root=parent.inner(temporary))
    try:
        # Held while it is being made: another process that publishes to the same path leaves it alone.
        with _held(parent, temporary):
            staged.create()
            yield staged
            _swap_in(parent, temporary, where.name)
    finally:
        _remove(parent, temporary)


def put_in_place(made: Path, path: Path) -> None:
    """Let a finished folder stand at ``path``, beside which it lies; what stood there before is gone then.

    Raises:
        OSError: it could not be; what was at ``path`` before is still there.
    """
    where = Path(os.path.realpath(path))
    parent = HeldFolder(where.parent)
    _swap_in(parent, made.name, where.name)
    _remove(parent, made.name)
    _remove_abandoned(parent, where.name)


def _swap_in(parent: HeldFolder, temporary: str, name: str) -> None:
    """Put a finished folder in its place, at one stroke; an earlier one is then where it came from.

    Where two folders cannot be exchanged, the earlier one steps aside for the moment between two renames.
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
        parent.rename(temporary, name)  # to nowhere, or onto an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        aside = f".{name}.{uuid.uuid4().hex}.old"
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
    """Remove a folder that nobody needs. An interrupt within ``rmtree`` would close a descriptor twice."""
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
    """Exchange two names in a folder at one stroke; return False where there is no such pair or no such call."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(parent.number, os.fsencode(one), parent.number, os.fsencode(other), _EXCHANGE) == 0)


@contextmanager
def _held(parent: HeldFolder, name: str) -> Iterator[None]:
    descriptor = Descriptor(parent.open_folder(name), of_process=True)
    try:
        with contextlib.suppress(OSError):  # file systems that lock no folders
            fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        descriptor.close()


def _remove_abandoned(parent: HeldFolder, name: str) -> None:
    """Remove what processes that were killed were making for this name."""
    with os.scandir(parent.number) as entries:
        left = [entry.name for entry in entries if entry.name.startswith(f".{name}.") and entry.name.endswith(".tmp")]
    for one in left:
        try:
            descriptor = parent.open_folder(one)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # somebody is making it
        except OSError:
            pass  # file systems that lock no folders: as it always was, the last one to come has it
        finally:
            os.close(descriptor)
        _remove(parent, one)
