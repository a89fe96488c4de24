"""Stores of witnesses, opened for writing or reading, and their contents after reopening."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.copies import copy_live
from tests.support.witness import check_trajectory, witness
from tools.crash.forked import forking
from trajstore import TrajectoryReplayBuffer
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AnyTrajectory


def opened(path: Path | str, **options: Any) -> TrajectoryReplayBuffer:
    """Return a buffer with ``options`` that writes to a path."""
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0, **options)


def writer_to(path: Path | str, **options: Any) -> TrajectoryReplayBuffer:
    """Return a buffer with ``options`` that writes to a path and draws from the newest trajectories."""
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)


def add_each(buffer: TrajectoryReplayBuffer, keys: Iterable[int]) -> None:
    """Add witnesses, each in its own commit and shard."""
    for key in keys:
        buffer.add_trajectories([witness(key)])
        buffer.flush()


def in_memory(trajectories: Sequence[AnyTrajectory], *, seed: int = 0, **options: Any) -> TrajectoryReplayBuffer:
    """Return an in-memory buffer of trajectories with ``options``."""
    buffer = TrajectoryReplayBuffer(seed=seed, sample_window_size=0, **options)
    buffer.add_trajectories(trajectories)
    return buffer


def stored(path: Path, trajectories: Sequence[AnyTrajectory], *, each: bool = False, **options: Any) -> Path:
    """Write a store of trajectories and close it; return its path. ``each``: one commit and shard per trajectory."""
    with writer_to(path, **options) as writer:
        for some in [[trajectory] for trajectory in trajectories] if each else [trajectories]:
            writer.add_trajectories(some)
            writer.flush()
    return path


def refused(batches: Iterable[Any], message: str, error: type[Exception] = ConfigurationError) -> None:
    """Check that batches end with an error.

    Ends the workers of a DataLoader: an iterator found by the garbage collector waits five seconds for each of them.
    """
    iterator: Any = iter(batches)
    with pytest.raises(error, match=message):
        for _ in iterator:
            pass
    if isinstance(batches, DataLoader):
        iterator._shutdown_workers()


def filled(path: Path | str, keys: Iterable[int], **options: Any) -> Path | str:
    """Write a store of witnesses, each in its own shard, and close it; return its path."""
    with writer_to(path, **options) as writer:
        add_each(writer, keys)
    return path


LIVE = {1: 5, 2: 3, 3: 4, 4: 11, 5: 6, 6: 7}
"""Keys of the live trajectories of :func:`crashed_store`, by id."""


def crashed_store(path: Path) -> Path:
    """Write a store in the state after a crash; return its path.

    Trajectory 0 is evicted and named by the pin ``start``. The log has a rewrite, and a commit of two shards whose ids
    interleave.
    """
    live = path.with_name(f"{path.name}.live")
    with writer_to(live) as first:
        first.add_trajectories([witness(1), witness(LIVE[1])])
        first.points.pin("start")
    with writer_to(live, trajectory_format="pkl") as second:
        add_each(second, (LIVE[2], LIVE[3]))
        second.evict([0])
        second.compact()
        second.add_trajectories([witness(LIVE[number]) for number in (4, 5, 6)])
        second.flush()
        return copy_live(live, path, "readers", "writer.lock")


def reader_of(path: Path | str) -> TrajectoryReplayBuffer:
    """Return a buffer that reads a path."""
    reader = TrajectoryReplayBuffer(sample_window_size=0)
    reader.load_checkpoint(path)
    return reader


def keys_of(buffer: TrajectoryReplayBuffer, scale: int = 1) -> dict[int, int]:
    """Return the witnesses' keys by id, after comparing all rows."""
    return {number: check_trajectory(buffer.get(number), scale) for number in buffer.trajectory_ids.tolist()}


def keys_at(path: Path | str, *arguments: Any, **options: Any) -> dict[int, int]:
    """Return the keys that a reader loads from a path; arguments as for ``load_checkpoint``."""
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(path, *arguments, **options)
        return keys_of(reader)


def contents_of(path: Path | str) -> list[int]:
    """Return the keys of a store's witnesses in order."""
    return list(keys_at(path).values())


def refused_to_all(path: Path | str, error: type[Exception], match: str = "") -> None:
    """Fail unless readers and writers refuse a path with the same reason."""
    for opening in (TrajectoryReplayBuffer.open, writer_to):
        with pytest.raises(error, match=match):
            opening(path)


def files_of(path: Path) -> dict[str, bytes]:
    """Return the content of every file below a path."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def damage_indexes(store: Path) -> None:
    """Truncate the index of a store and its copy."""
    for name in ("trajectory_index.json", "index_copy.json"):
        os.truncate(store / name, 40)


def overwrite_by_rlinf(store: Path) -> None:
    """Replace the JSON files of a store as RLinf does: no part of it is readable then."""
    size = json.loads((store / "metadata.json").read_text())["size"]
    told = {"trajectory_format": "pt", "size": size, "total_samples": size, "trajectory_counter": size, "seed": 1}
    (store / "metadata.json").write_text(json.dumps(told))
    damage_indexes(store)


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


@contextmanager
def nothing_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While entered, make removals in local directories fail."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "no")

    with monkeypatch.context() as patch:
        patch.setattr(LocalDirectory, "remove", fail)
        yield


def _write_until_killed(path: Path, pipe: Connection) -> None:
    with writer_to(path):
        pipe.send("open")
        while True:
            signal.pause()


@contextmanager
def another_writer(path: Path) -> Iterator[int]:
    """Write a store in a child process; yield its pid, so that it can be stopped; kill it at the end."""
    mine, theirs = multiprocessing.Pipe()
    process = forking().Process(target=_write_until_killed, args=(path, theirs))
    process.start()
    theirs.close()  # so that a failing process ends the wait
    assert process.pid is not None
    assert mine.recv() == "open"
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()
