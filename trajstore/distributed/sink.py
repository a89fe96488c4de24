"""A new run of stores as a sink of Ray Data: each task writes a store of its own, and all appear when all are whole."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.distributed.rows import trajectory_of
from trajstore.errors import ConfigurationError, MissingDependencyError, StoreError, listed
from trajstore.files.base import Directory
from trajstore.files.holder import LOCK_NAME, holder_document
from trajstore.files.local import LocalDirectory
from trajstore.files.opening import open_directory
from trajstore.files.remote import RemoteDirectory
from trajstore.store.sealed import METADATA_NAME

try:
    from ray.data import Datasink
    from ray.data.block import Block, BlockAccessor
except ImportError as error:
    raise MissingDependencyError("ray", "ray") from error

logger = logging.getLogger(__name__)

CLAIM = ".writing.json"
"""Object that says which job writes a run in an object store."""

_OF_WRITERS = re.compile(rf"{re.escape(LOCK_NAME)}$|readers/")


class StoreDatasink(Datasink[str | None]):
    """Writes whole trajectories (rows of ``unit="trajectory"``) to a new run directory, a store for each task.

    The stores appear as ``rank_0``, ``rank_1``, ... when all tasks have ended, and not at all when one has failed.
    Ray may run a task twice; what its first attempt wrote is removed. ``rank_0`` gets its name last, so whoever reads
    meanwhile is told that the run is not complete.

    In an object store nothing can be renamed: the server copies each object to its final name, and the first one is
    deleted. A store takes two writing requests for each object, and for a moment the space of both.

    Args:
        path: of the run, absent or empty: a URL, or a local path that every node reaches.
        storage_options: passed on to the fsspec file system.
        options: of each store's buffer: ``trajectory_format``, ``writer``, ...

    Raises:
        ConfigurationError: it is not empty.
    """

    def __init__(self, path: str | Path, *, storage_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        directory = open_directory(path, **(storage_options or {}))
        if isinstance(directory, LocalDirectory):
            directory = LocalDirectory(Path(directory.url).absolute())  # tasks run elsewhere
        self._options = {**options, "storage_options": dict(storage_options or {})}
        self._prefix = f".part-{uuid.uuid4().hex[:12]}-"
        self._run: _Run = (
            _LocalRun(directory, self._prefix)
            if isinstance(directory, LocalDirectory)
            else _RemoteRun(directory, self._prefix)
        )
        self._run.check_empty()

    def on_write_start(self, schema: Any = None) -> None:
        """Make the directory, or claim the place in an object store.

        Raises:
            ConfigurationError: it is not empty any more.
        """
        self._run.begin()

    def write(self, blocks: Iterable[Block], ctx: Any) -> str | None:
        """Write the rows of one task to a store of its own; return its hidden name, None if there were none."""
        name = f"{self._prefix}{ctx.task_idx:06d}-{uuid.uuid4().hex}"
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=self._run.place_of(name), **self._options) as buffer:
            for block in blocks:
                rows: Iterator[Any] = BlockAccessor.for_block(block).iter_rows(public_row_format=True)
                for row in rows:
                    buffer.add_trajectories([trajectory_of(row)])
            written = len(buffer)
        return name if written else None

    def on_write_complete(self, write_result: Any) -> None:
        """Give the stores their names."""
        names = sorted(name for name in write_result.write_returns if name is not None)
        if not names:
            logger.warning("%s: the dataset has no rows; the run has one store, which is empty", self._run.url)
            names = [f"{self._prefix}empty"]
            with TrajectoryReplayBuffer(auto_save=True, auto_save_path=self._run.place_of(names[0]), **self._options):
                pass
        for rank in reversed(range(len(names))):
            self._run.publish(names[rank], rank)
        self._run.end()

    def on_write_failed(self, error: Exception) -> None:
        """Remove what was written."""
        self._run.withdraw()


class _Run(ABC):
    """The place of a new run.

    Args:
        directory: of the run.
        prefix: of the names of this job's stores, as long as they are hidden.
    """

    def __init__(self, directory: Directory, prefix: str) -> None:
        self.directory = directory
        self.prefix = prefix
        self.published: list[str] = []

    @property
    def url(self) -> str:
        """Path or URL."""
        return self.directory.url

    def place_of(self, name: str) -> str:
        """Return path or URL of a store below."""
        return self.directory.inner(name).url

    def check_empty(self) -> None:
        """Refuse a place where something lies."""
        files, folders = self.directory.listing()
        if files or folders:
            raise ConfigurationError(
                f"{self.url}: is not empty ({listed([*files, *folders], 5)}); write to a directory of its own"
            )

    @abstractmethod
    def begin(self) -> None:
        """Take the place, which is empty."""

    @abstractmethod
    def publish(self, name: str, rank: int) -> None:
        """Give a store its final name; the one of rank 0 comes last."""

    @abstractmethod
    def end(self) -> None:
        """Remove what attempts left that do not count."""

    @abstractmethod
    def withdraw(self) -> None:
        """Remove all that this job wrote, rank 0 first."""


class _LocalRun(_Run):
    """In a folder, where a store is renamed."""

    def begin(self) -> None:
        self.check_empty()
        Path(self.url).mkdir(parents=True, exist_ok=True)

    def publish(self, name: str, rank: int) -> None:
        target = f"rank_{rank}"
        (Path(self.url) / name).rename(Path(self.url) / target)
        self.published.append(target)

    def end(self) -> None:
        folder = Path(self.url)
        if not folder.is_dir():
            return
        self._remove([part.name for part in folder.glob(f"{self.prefix}*")])
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def withdraw(self) -> None:
        self._remove(reversed(self.published))
        self._remove([part.name for part in Path(self.url).glob(f"{self.prefix}*")])

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            shutil.rmtree(Path(self.url) / name, onerror=self._tell)

    def _tell(self, function: Any, path: str, error: Any) -> None:
        logger.warning("%s: could not be removed (%s); no reader takes it for data, delete it", path, error[1])


class _RemoteRun(_Run):
    """In an object store, where each object of a store is copied to its final name by the server."""

    def begin(self) -> None:
        self.check_empty()
        claim = json.dumps({**holder_document(), "job": self.prefix}).encode()
        try:
            self.directory.append(CLAIM, claim)
        except FileExistsError as error:
            raise ConfigurationError(
                f"{self.url}: another job writes there; write to a directory of its own"
            ) from error

    def publish(self, name: str, rank: int) -> None:
        run, target = self.directory, f"rank_{rank}"
        if not isinstance(run, RemoteDirectory):
            raise TypeError(f"{run.url}: is no directory in an object store")
        sizes = {file: size for file, size in run.inner(name).sizes().items() if not _OF_WRITERS.match(file)}
        self.published.append(target)
        last = [file for file in sizes if file == METADATA_NAME]
        for files in ([file for file in sizes if file not in last], last):
            run.copy_files({f"{name}/{file}": f"{target}/{file}" for file in files})
        if run.inner(target).sizes() != sizes:
            raise StoreError(
                f"{self.place_of(target)}: is not what was written to {self.place_of(name)}; write it again"
            )

    def end(self) -> None:
        self._remove(self.prefix)
        self.directory.remove([CLAIM])

    def withdraw(self) -> None:
        for target in reversed(self.published):
            self._remove(f"{target}/")
        self._remove(self.prefix)
        if self._is_claimed():
            self.directory.remove([CLAIM])

    def _is_claimed(self) -> bool:
        try:
            return bool(json.loads(self.directory.read(CLAIM)).get("job") == self.prefix)
        except FileNotFoundError:
            return False

    def _remove(self, prefix: str) -> None:
        names = [name for name in self.directory.sizes() if name.startswith(prefix)]
        self.directory.remove([name for name in names if name.endswith(METADATA_NAME)])
        self.directory.remove([name for name in names if not name.endswith(METADATA_NAME)])
