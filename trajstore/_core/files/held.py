"""A folder held by a descriptor: calls are relative to it, even after it or the process moves."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.files.descriptors import Descriptor
from trajstore.errors import ConfigurationError, CorruptStoreError, DescriptorLimitError, StoreError, StoreNotFoundError

T = TypeVar("T")

_NOT_A_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR)
"""Error numbers of the system for a name that is not a regular file; ``ENXIO`` for sockets and pipes."""

_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Limits of Linux and its file systems, in bytes."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class HeldFolder:
    """A folder, opened once and then used by its descriptor. Thread-safe.

    It is opened on construction, or by the first call after it exists. A relative path is resolved on construction. All
    calls raise ``OSError`` with the file's path as given; ``StoreNotFoundError`` if the folder itself was removed.
    Construction raises ``ConfigurationError`` for a path that no folder can have.

    Args:
        path: of the folder; may be absent at first.
        where: its absolute path, if known.
        above: the held parent folder and the name in it, if there is one.
    """

    def __init__(self, path: Path, where: str | None = None, *, above: tuple[HeldFolder, str] | None = None) -> None:
        self.path = path
        if above is None:
            check_path(path)
        self.where = where or os.path.join(_working_folder(path), path)
        """Absolute path at the time of opening."""
        self._above = above
        self._mutex = locks.lock("HeldFolder._mutex")
        self._held: Descriptor | None = None
        self._made = above is not None  # a held parent makes this name durable
        self._counted = True  # some file systems do not count links of folders
        with contextlib.suppress(OSError):  # absent or unreadable: the call that uses it raises
            self._open()

    def _open(self) -> Descriptor:
        with self._mutex:
            if self._held is None:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                if self._above is None:
                    self._held = Descriptor(os.open(self.where, flags))
                else:
                    folder, name = self._above
                    self._held = Descriptor(os.open(name, flags, dir_fd=folder.number))
                    self._above = None
                self._counted = os.fstat(self._held.number).st_nlink > 0
            return self._held

    def inner(self, name: str) -> HeldFolder:
        """Return a subfolder, relative to this folder's present place."""
        return HeldFolder(self.path / name, os.path.join(self.where, name), above=(self, name))

    @property
    def number(self) -> int:
        """The folder's descriptor.

        Raises:
            FileNotFoundError, NotADirectoryError: the folder is absent; names its path.
        """
        if self._held is not None:
            return self._held.number
        try:
            return self._open().number
        except OSError as error:
            number = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno  # links in a circle
            raise _with_path(number or errno.EIO, error.strerror or str(error), str(self.path)) from None

    def is_there(self) -> bool:
        """Return whether the folder exists and was not removed since it was opened."""
        try:
            return os.fstat(self.number).st_nlink > 0 or not self._counted
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno != errno.ESTALE:  # from network file systems, for a removed folder
                raise
            return False

    def make(self) -> None:
        """Create the folder and its absent parents, durably.

        Raises:
            FileNotFoundError: it was opened before, and has been removed.
        """
        if self._held is None:
            make_path(self.where)
            self._open()
        self.check()
        if not self._made:
            try:
                sync_above(self.where)
            except DescriptorLimitError:
                raise
            except OSError as error:
                text = f"{error.strerror}: the name of this directory could not be made durable in {error.filename}"
                raise OSError(error.errno, text, str(self.path)) from error
            self._made = True

    def check(self) -> None:
        """Check that the folder was not removed.

        Raises:
            FileNotFoundError: it was removed.
        """
        if not self.is_there():
            raise self._removed()

    def _removed(self) -> StoreNotFoundError:
        return StoreNotFoundError(
            f"{self.path}: was removed or replaced while it was open (it was {self.where}); open or load it again"
        )

    def fate(self) -> str | None:
        """Describe what happened to the folder since it was opened; None if it is in its place."""
        try:
            if not self.is_there():
                return f"{self.path} was removed or replaced while it was open (it was {self.where})"
            mine, present = os.fstat(self.number), os.stat(self.where)
        except OSError:
            return None
        if (present.st_dev, present.st_ino) != (mine.st_dev, mine.st_ino):
            return f"another directory has replaced the one that was opened at {self.where}"
        return None

    # -- calls to the system -----------------------------------------------------------------------

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Add the file's path to errors, which calls by a descriptor do not know."""
        try:
            yield
        except OSError as error:
            raise self.named(error, name) from error

    def _called(self, name: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Return the result of a system call, as in :meth:`naming`, which costs more than most calls."""
        try:
            return call(*arguments, **options)
        except OSError as error:
            raise self.named(error, name) from error

    def named(self, error: OSError, name: str) -> OSError:
        """Return an error with the path of its file."""
        if isinstance(error, DescriptorLimitError):
            return error
        number, text = error.errno or errno.EIO, error.strerror or str(error)
        if number == errno.ENAMETOOLONG:
            number = errno.ENOENT  # no file can have this name: a damaged index names anything
        if number == errno.ENOENT and not self.is_there():
            return self._removed()
        return _with_path(number, text, str(self.path / name) if name else str(self.path))

    def open(self, name: str, flags: int) -> int:
        """Open a file and return its descriptor, without blocking on pipes or devices.

        Raises:
            CorruptStoreError: it is a folder, a pipe, a socket, a device or a symbolic link in a circle.
        """
        root = self.number
        try:
            descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666, dir_fd=root)
        except OSError as error:
            raise self._named_file(error, name) from error
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise self._no_file(name, _KINDS.get(stat.S_IFMT(mode), "no file"))
        return descriptor

    @contextmanager
    def opened(self, name: str, flags: int) -> Iterator[int]:
        """Yield a descriptor as from :meth:`open` and close it after the block; errors in the block name the file."""
        descriptor = self.open(name, flags)
        try:
            yield descriptor
        except OSError as error:
            if isinstance(error, StoreError) or error.filename is not None:  # names its file
                raise
            raise self.named(error, name) from error
        finally:
            os.close(descriptor)

    def _named_file(self, error: OSError, name: str) -> Exception:
        """Do as :meth:`named`, for names that must be regular files."""
        is_file = error.errno not in _NOT_A_FILE
        return self.named(error, name) if is_file else self._no_file(name, os.strerror(error.errno or errno.EIO))

    def _no_file(self, name: str, what: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.path / name}: not a file ({what}); restore it from a copy")

    def stat(self, name: str) -> os.stat_result:
        """Return a file's status; symbolic links are followed.

        Raises:
            CorruptStoreError: it is not a regular file.
        """
        root = self.number
        try:
            status = os.stat(name, dir_fd=root)
        except OSError as error:
            raise self._named_file(error, name) from error
        if not stat.S_ISREG(status.st_mode):
            raise self._no_file(name, _KINDS.get(stat.S_IFMT(status.st_mode), "no file"))
        return status

    def version(self, name: str) -> tuple[int, int, int] | None:
        """Return values that change when a file is written or replaced; None if it cannot be opened."""
        try:  # NFS compares with its server when a file is opened; a status may be a minute old
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=self.number)
        except OSError:
            return None
        status = os.fstat(descriptor)
        os.close(descriptor)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def sizes(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the sizes of these files, -1 for absent ones; symbolic links are followed."""
        sizes = np.full(len(names), -1, np.int64)
        try:
            root = self.number
        except (FileNotFoundError, NotADirectoryError):
            return sizes
        for at, name in enumerate(names):
            try:
                status = os.stat(name, dir_fd=root)
            except OSError as error:
                if error.errno in _NO_SUCH_FILE:
                    continue
                raise self.named(error, name) from error
            if not stat.S_ISDIR(status.st_mode):
                sizes[at] = status.st_size
        return sizes

    def has_folder(self, name: str) -> bool:
        """Return whether there is a folder with this name."""
        root = self.number
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=root).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self.named(error, name) from error

    def open_folder(self, name: str = "") -> int:
        """Open a subfolder, or the folder itself, and return the descriptor."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return self._called(name, os.open, name or ".", flags, dir_fd=self.number)

    def make_folder(self, name: str, *, shared: bool = False) -> None:
        """Create a subfolder, if absent; its name is durable after :meth:`sync` of the parent.

        Args:
            name: of the folder.
            shared: a new folder gets the owner and permissions of this one.
        """
        root = self.number
        with self.naming(name):
            try:
                os.mkdir(name, dir_fd=root)
            except FileExistsError:
                if not self.has_folder(name):
                    raise
                return
            if shared:
                mine = os.fstat(root)
                with contextlib.suppress(OSError):  # only root may change owners, and not every file system has them
                    os.chown(name, mine.st_uid, mine.st_gid, dir_fd=root, follow_symlinks=False)
                with contextlib.suppress(OSError):
                    os.chmod(name, stat.S_IMODE(mine.st_mode), dir_fd=root)

    def rename(self, name: str, new: str) -> None:
        """Rename a file or folder."""
        root = self.number
        self._called(name, os.rename, name, new, src_dir_fd=root, dst_dir_fd=root)

    def unlink(self, name: str) -> None:
        """Unlink a file."""
        self._called(name, os.unlink, name, dir_fd=self.number)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        self._called(name, os.rmdir, name, dir_fd=self.number)

    def sync(self, name: str = "") -> None:
        """Make the names in a folder durable."""
        descriptor = self.open_folder(name)
        try:
            self._called(name, os.fsync, descriptor)
        finally:
            os.close(descriptor)


def check_path(path: Path) -> Path:
    """Return a path that the system can take.

    Raises:
        ConfigurationError: it is too long, or has characters that no path has.
    """
    try:
        parts = [os.fsencode(part) for part in path.parts]
    except UnicodeEncodeError:
        parts = [b"\0"]
    if b"\0" in b"".join(parts):
        raise ConfigurationError(f"{str(path)!r}: has a character that no path can have; choose another")
    longest, whole = max(map(len, parts), default=0), len(b"/".join(parts))
    if longest > _LONGEST_NAME or whole > _LONGEST_PATH:
        problem = f"a name in it has {longest:,} bytes" if longest > _LONGEST_NAME else f"has {whole:,} bytes"
        raise ConfigurationError(
            f"{path}: {problem}; names may have {_LONGEST_NAME} and paths {_LONGEST_PATH:,}: choose a shorter one"
        )
    return path


def make_path(where: str) -> None:
    """Create a folder and its absent parents; :func:`sync_above` makes their names durable."""
    absent = []
    folder = where
    while not os.path.isdir(folder):
        absent.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(absent):
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None


def sync_above(where: str) -> None:
    """Make the names of a folder and all its parents durable.

    A process that created them may have been killed before it did so.
    """
    if not os.path.isdir(where):
        return  # moved meanwhile
    device = os.stat(where).st_dev
    while (folder := os.path.dirname(where)) != where and os.stat(folder).st_dev == device:
        if os.access(folder, os.R_OK):  # unreadable folders belong to others, who make them durable
            _sync_path(folder)
        where = folder


def _with_path(number: int, text: str, path: str) -> OSError:
    """Return an error of a file; a :class:`DescriptorLimitError` with the limit if too many are open."""
    if number not in (errno.EMFILE, errno.ENFILE):
        return OSError(number, text, path)
    limit = "the limit of this machine is reached (fs.file-max)"
    if number == errno.EMFILE:
        limit = f"this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} (ulimit -n)"
    return DescriptorLimitError(f"{path}: too many open files: {limit}; close readers and buffers, or raise the limit")


def _sync_path(folder: str) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _with_path(error.errno or errno.EIO, error.strerror or str(error), folder) from error
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, folder) from error
    finally:
        os.close(descriptor)


def _working_folder(path: Path) -> str:
    if path.is_absolute():
        return ""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise StoreNotFoundError(
            f"{path}: is relative, and the working directory was removed; give the whole path"
        ) from error
