"""New names are synced before they are relied on, and deletions are durable in the required order."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.stores import add_each, opened
from tests.support.waiting import wait_until
from tests.support.witness import witness
from trainer_hooks.replay.persistence import POOL_FILES, PoolContents, read_pool, write_pool
from trajstore import Retention, WriterOptions
from trajstore._core.files import folders as folders_module
from trajstore._core.files import held as held_module
from trajstore._core.files import local as local_module
from trajstore.operations.verify import verify


class Recorder:
    """Stands in for the module ``os`` and records a directory's calls.

    Attributes:
        calls: (call, absolute path) in order.
        unsynced: new names whose folder has not been synced since.
    """

    def __init__(self, watch: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.unsynced: set[str] = set()
        self._watch = watch
        self._mutex = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "fsync", "rename", "mkdir", "link", "unlink"):
            return real

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._watch()
            path = self._note(name, arguments, keywords)
            result = real(*arguments, **keywords)
            if path is not None:
                self.calls.append((name, path))
                with self._mutex:
                    if name == "fsync":
                        self.unsynced = {entry for entry in self.unsynced if os.path.dirname(entry) != path}
                    elif name != "unlink":
                        self.unsynced.add(path)
            self._watch()
            return result

        return call

    def _note(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
        """Return the path that a call creates, removes or syncs."""
        if name == "fsync":
            return os.readlink(f"/proc/self/fd/{arguments[0]}")
        folder = keywords.get("dst_dir_fd", keywords.get("dir_fd"))
        above = "/" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        path = os.path.join(above, arguments[1] if name in ("rename", "link") else arguments[0])
        if name == "open" and (not arguments[1] & os.O_CREAT or os.path.exists(path)):
            return None
        return path if name != "mkdir" or not os.path.exists(path) else None

    def place_of(self, call: str, part: str) -> int:
        """Return the position of the first call on a path containing ``part``."""
        return next(at for at, (name, path) in enumerate(self.calls) if name == call and part in path)


@contextmanager
def recording(watch: Callable[[], None] = lambda: None) -> Iterator[Recorder]:
    recorder = Recorder(watch)
    with ExitStack() as patches:
        for module in (folders_module, held_module, local_module):
            patches.enter_context(mock.patch.object(module, "os", recorder))
        yield recorder


@pytest.mark.parametrize("fmt", ["pt", "zarr"])
def test_every_name_is_synced_when_a_call_returns(tmp_path: Path, fmt: str) -> None:
    store = tmp_path / "a" / "b" / "store"
    # Not durable by contract: the lock, which is useless after a crash, and metadata.json, which the writer's thread
    # refreshes at times of its own.
    renewed = {str(store / "metadata.json"), str(store / "metadata.json.tmp")}
    unpromised = renewed | {str(store / "writer.lock")}
    with recording() as recorder, opened(store, trajectory_format=fmt) as buffer:
        assert recorder.unsynced <= unpromised
        for key in range(3):
            add_each(buffer, [key])
            assert recorder.unsynced <= renewed
        buffer.points.pin("kept")
        assert recorder.unsynced <= renewed
        for _ in range(2):
            buffer.save_checkpoint(tmp_path / "c" / "checkpoint")
            assert recorder.unsynced <= renewed
        buffer.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
        assert recorder.unsynced <= renewed
        wait_until(lambda: not recorder.unsynced)
    assert {str(tmp_path / "a"), str(tmp_path)} < {path for name, path in recorder.calls if name == "fsync"}


def test_a_pin_goes_for_good_before_the_files_that_it_held(tmp_path: Path) -> None:
    with opened(tmp_path, writer=WriterOptions(shard_bytes=1), retention=Retention(max_trajectories=1)) as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.points.pin("kept")
        add_each(buffer, [1])
        with recording() as recorder:
            buffer.points.remove("kept")
    unpinned = recorder.place_of("unlink", "pins/kept.json")
    assert unpinned < recorder.place_of("fsync", str(tmp_path / "pins")) < recorder.place_of("unlink", "shards/")


def test_a_checkpoint_is_whole_at_every_moment_of_being_replaced(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.save_checkpoint(path)
        sizes = set()

        def watch() -> None:
            sizes.add(len(os.listdir(path)))
            assert (path / "metadata.json").exists()

        with recording(watch):
            buffer.add_trajectories([witness(1)])
            buffer.save_checkpoint(path)
    assert sizes == {4}
    assert verify(path).trajectories == 2


def test_a_saved_pool_is_whole_at_every_moment_of_being_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    write_pool(folder, PoolContents({0: ["a"]}, [], {}))

    def watch() -> None:
        assert sorted(os.listdir(folder)) == sorted(POOL_FILES)

    with recording(watch) as recorder:
        write_pool(folder, PoolContents({0: ["b"]}, [], {}))
    assert not recorder.unsynced
    assert read_pool(folder).difficulty2task_dict == {0: ["b"]}
    assert os.listdir(tmp_path) == ["step_3"]


def test_what_a_killed_save_left_is_removed_and_what_a_live_one_makes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    left = tmp_path / ".checkpoint.0123.tmp"
    (left / "log").mkdir(parents=True)
    (left / "metadata.json").write_text("{}")
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(0)])
        with folders_module.publish_folder(path) as other:
            buffer.save_checkpoint(path)
            assert not left.exists()
            assert other.exists()
    assert os.listdir(path) == []  # the last saver to publish owns the name
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "store"]


def test_an_interrupt_does_not_come_while_folders_are_removed(tmp_path: Path) -> None:
    """In the main thread, an interrupted ``rmtree`` closes a descriptor twice and reports that error."""
    threads = []

    def removed(*arguments: Any, **options: Any) -> None:
        threads.append(threading.current_thread())
        shutil.rmtree(*arguments, **options)

    with mock.patch.object(folders_module, "shutil", mock.Mock(rmtree=removed)):
        for _ in range(2):
            with folders_module.publish_folder(tmp_path / "folder") as made:
                Path(made.url, "inner").mkdir()
    assert threads
    assert threading.main_thread() not in threads
    assert os.listdir(tmp_path) == ["folder"]
