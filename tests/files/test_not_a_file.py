"""Paths that are no regular files, or are huge, are refused immediately by every reader."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores import add_each, filled, reader_of
from tests.support.copies import copy_live
from tests.support.witness import check_trajectory
from trainer_hooks.replay.persistence import POOL_FILES, read_pool
from trajstore import TrajectoryReplayBuffer, errors
from trajstore.operations.copying import copy_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path itself may be too long for a socket
        finally:
            os.close(folder)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": make_socket,
    "loop": make_loop,
    "endless": make_endless,
    "huge": make_huge,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with all kinds of files: three trajectories in three shards, two of them only in the log."""
    path = tmp_path_factory.mktemp("store")
    made = path / "made"
    filled(made, [0])
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=made, sample_window_size=0) as buffer:
        add_each(buffer, (1, 2))
        buffer.points.pin("kept")
        copy_live(made, path / "copy")  # the state after a writer is killed
    return path / "copy"


def look(call: Callable[[], object]) -> Exception | None:
    """Return the project's own error that a call raises, or None."""
    try:
        call()
    except errors.TrajstoreError as error:
        return error
    return None


def read_all(path: Path) -> None:
    with reader_of(path) as reader:
        assert [check_trajectory(reader.get(number)) for number in range(3)] == [0, 1, 2]
        reader.sample(64)


def write_on(path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer:
        add_each(buffer, [9])
        for number in range(3):
            buffer.get(number)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_hangs_or_is_read_without_end(store: Path, tmp_path: Path, kind: str) -> None:
    files = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    assert len(files) == 9, files
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(store, copy)
        (copy / file).unlink()
        KINDS[kind](copy / file)
        has_copy = file in ("trajectory_index.json", "index_copy.json")
        read = file != "writer.lock" and not has_copy
        error = look(lambda copy=copy: read_all(copy))  # type: ignore[misc]
        assert (error is not None and file in str(error)) == read, (file, error)
        sound = verify(copy).sound
        look(lambda copy=copy: inspect(copy))  # type: ignore[misc]
        refused = look(lambda copy=copy: write_on(copy)) is not None  # type: ignore[misc]
        assert refused == (read or (kind == "folder" if has_copy else file == "writer.lock" and kind != "huge")), file
        assert sound == (not refused and not has_copy), file


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "loop", "endless", "huge"])
def test_a_pool_of_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    for name in POOL_FILES:
        folder = tmp_path / name
        folder.mkdir()
        for other in POOL_FILES:
            (folder / other).write_bytes(b"{}" if "dict" in other else b"[]")
        (folder / name).unlink()
        KINDS[kind](folder / name)
        with pytest.raises(errors.CorruptStoreError, match=name):
            read_pool(folder)


def test_a_path_that_is_a_link_in_a_circle_is_no_directory(store: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    make_loop(loop)
    for call in (
        lambda: read_all(loop),
        lambda: read_all(loop / "inside"),
        lambda: write_on(loop),
        lambda: TrajectoryReplayBuffer().save_checkpoint(loop),
        lambda: verify(loop),
        lambda: inspect(loop),
        lambda: copy_store(loop, tmp_path / "copy"),
        lambda: copy_store(store, loop),
    ):
        assert "loop" in str(look(call))


def test_links_to_files_are_followed(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "moved")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in sorted((tmp_path / "moved").rglob("*")):
        name = path.relative_to(tmp_path / "moved")
        if path.is_dir():
            (copy / name).mkdir()
        else:
            (copy / name).symlink_to(path)
    read_all(copy)
    assert verify(copy).sound
