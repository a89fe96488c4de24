"""Places of stores, copies as a crash would leave them, and ranks in threads of one process."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from trajstore._core.files.held import HeldFolder

HELD = ("rename", "unlink", "remove_folder")
LEFT_OUT = ("readers", "writer.lock")


ONE = threading.RLock()
"""Held by each call of fsspec's memory, which expects a single thread: listing it while files change fails."""


def one_at_a_time(genuine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of fsspec's memory that holds ``ONE``."""

    def call(*arguments: Any, **options: Any) -> Any:
        with ONE:
            return genuine(*arguments, **options)

    return call


def open_own(self: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
    """Open a file; readers get a position each, where fsspec's memory gives all of them one."""
    if mode != "rb":
        return SHARED_OPEN(self, path, mode, **options)
    return MemoryFile(self, path, self.cat_file(path))


SHARED_OPEN = MemoryFileSystem._open
CALLS = ("ls", "info", "pipe_file", "_rm", "cat_file", "_open")


def make_shareable() -> None:
    """Let the threads of this process share fsspec's memory."""
    if MemoryFileSystem._open is SHARED_OPEN:
        MemoryFileSystem._open = open_own
        for name in CALLS:
            setattr(MemoryFileSystem, name, one_at_a_time(getattr(MemoryFileSystem, name)))


class Place:
    """A folder for stores: a local one, or one of a bucket in memory.

    Args:
        folder: a temporary folder of this process.
        bucket: whether it is in a bucket.
    """

    def __init__(self, folder: Path, bucket: bool) -> None:
        self.folder, self.bucket = folder, bucket
        if bucket:
            make_shareable()
        self.root = f"memory://{folder.name}" if bucket else str(folder)
        self.numbers = iter(range(10_000))

    def new(self, name: str) -> str:
        """Return the path of a new folder."""
        return f"{self.root}/{name}-{next(self.numbers)}"

    def files(self, path: str) -> dict[str, bytes]:
        """Return the files of a store by name, without locks and leases."""
        if self.bucket:
            prefix = path.removeprefix("memory:/") + "/"
            store = {
                key.removeprefix(prefix): file
                for key, file in MemoryFileSystem.store.copy().items()
                if key.startswith(prefix)
            }
            return {name: file.getvalue() for name, file in store.items() if not set(name.split("/")) & set(LEFT_OUT)}
        below = [file for file in Path(path).rglob("*") if file.is_file()]
        names = {str(file.relative_to(path)): file for file in below}
        return {name: file.read_bytes() for name, file in names.items() if not set(name.split("/")) & set(LEFT_OUT)}

    def write(self, path: str, files: dict[str, bytes]) -> None:
        """Write the files of a copy."""
        for name, data in files.items():
            if self.bucket:
                MemoryFileSystem().pipe_file(f"{path}/{name}", data)
            else:
                (Path(path) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(path) / name).write_bytes(data)

    def remove(self) -> None:
        """Remove everything."""
        for key in [key for key in MemoryFileSystem.store.copy() if key.startswith(f"/{self.folder.name}/")]:
            MemoryFileSystem()._rm(key)
        shutil.rmtree(self.folder)

    @contextmanager
    def moments(self, path: str) -> Iterator[list[dict[str, bytes]]]:
        """Copy a store before each change of its files, and at the end.

        Changes by threads that run already are left out, so that each run has the same moments.
        """
        copies: list[dict[str, bytes]] = []
        others = set(threading.enumerate()) - {threading.current_thread()}
        one = threading.RLock()

        def copying(genuine: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                with one:
                    if threading.current_thread() not in others:
                        copies.append(self.files(path))
                    return genuine(*arguments, **options)

            return call

        kind, names = (MemoryFileSystem, ("pipe_file", "_rm")) if self.bucket else (HeldFolder, HELD)
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(kind, name, copying(getattr(kind, name)))
            yield copies
            with one:
                copies.append(self.files(path))


class Ranks:
    """``torch.distributed`` for threads: the ranks run in turns, and meet in collective calls.

    Args:
        count: number of ranks.
        dies: a rank, and the number of the meeting to which it does not come.
        met: called with a rank and the number of a meeting that it leaves.
    """

    def __init__(self, count: int, dies: tuple[int, int] | None, met: Callable[[int, int], None]) -> None:
        self.count, self.dies, self.met = count, dies, met
        self.turn = threading.Condition()
        self.here = threading.local()
        self.meetings: list[dict[int, Any]] = [{} for _ in range(10)]
        self.died = False

    def call(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function in each rank's thread; return the results or errors by rank."""
        results: list[Any] = [None] * self.count

        def work(rank: int) -> None:
            self.here.rank, self.here.number = rank, 0
            with self.turn:
                try:
                    results[rank] = function(rank)
                except Exception as error:
                    results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        with mock.patch.multiple(
            torch.distributed,
            is_initialized=lambda: True,
            get_rank=lambda group: self.here.rank,
            get_world_size=lambda group: self.count,
            all_gather_object=lambda out, mine, group: out.__setitem__(slice(None), self.meet(mine)),
            broadcast_object_list=lambda out, group_src, group: out.__setitem__(slice(None), self.meet([*out])[0]),
        ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    def meet(self, value: Any) -> list[Any]:
        """Wait for all ranks; return their values.

        Raises:
            RuntimeError: a rank does not come.
        """
        rank, number = self.here.rank, self.here.number
        self.here.number += 1
        values = self.meetings[number]
        if self.dies == (rank, number):
            self.died = True
        else:
            values[rank] = value
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.died or len(values) == self.count)
        if len(values) < self.count:
            raise RuntimeError("a rank has died")
        self.met(rank, number)
        return [values[rank] for rank in range(self.count)]
