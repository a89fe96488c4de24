"""Local copies of remote files: made once, bounded, and deleted with their directory unless a folder was given."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.stores import add_each, filled, flip, reader_of
from tests.support.directory import publish
from tests.support.witness import check_trajectory
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.opening import open_directory
from trajstore._core.files.read_cache import ReadCache
from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.remote.directory import RemoteDirectory
from trajstore.remote.object_store import ObjectStore


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each downloaded object."""
    names: list[str] = []
    download = ObjectStore.download

    def counting(self: ObjectStore, name: str, size: int, target: Path) -> None:
        names.append(name)
        download(self, name, size, target)

    monkeypatch.setattr(ObjectStore, "download", counting)
    return names


def test_a_copy_is_made_once_and_outlives_the_process(memory_url: str, tmp_path: Path, downloads: list[str]) -> None:
    publish(open_directory(memory_url), a=b"1", b=b"2")
    for _ in range(2):
        directory = RemoteDirectory(memory_url, cache_dir=tmp_path / "cache")
        assert [directory.map(name).view.tobytes() for name in "abab"] == [b"1", b"2", b"1", b"2"]
    assert downloads == ["a", "b"]


def test_directories_do_not_share_copies(tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        directory = RemoteDirectory(f"memory://bucket-{uuid.uuid4()}", cache_dir=tmp_path)
        publish(directory, a=content)
        assert directory.map("a").view.tobytes() == content


def test_least_recently_used_copies_go_first(memory_url: str, tmp_path: Path, downloads: list[str]) -> None:
    directory = RemoteDirectory(memory_url, cache_dir=tmp_path, cache_bytes=250)
    publish(directory, a=b"a" * 100, b=b"b" * 100, c=b"c" * 100)
    copies = {}
    for age, name in enumerate("ba"):  # b was used last
        held = directory.map(name)
        (copies[name],) = set(tmp_path.iterdir()) - set(copies.values())
        long_ago = time.time() - 20 - age
        os.utime(copies[name], (long_ago, long_ago))
    directory.map("c")
    assert not copies["a"].exists()
    assert copies["b"].exists()
    assert held.view.tobytes() == b"a" * 100
    assert directory.map("a").view.tobytes() == b"a" * 100
    assert downloads == ["b", "a", "c", "a"]


def test_maps_stay_when_their_copies_go(memory_url: str, tmp_path: Path) -> None:
    directory = RemoteDirectory(memory_url, cache_dir=tmp_path, cache_bytes=0)
    publish(directory, a=b"1", b=b"2")
    first, second = directory.map("a"), directory.map("b")
    assert list(tmp_path.iterdir()) == []
    assert (first.view.tobytes(), second.view.tobytes()) == (b"1", b"2")


def test_temporary_copies_go_with_their_directory(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = open_directory(memory_url)
    publish(directory, a=b"1")
    directory.map("a")
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 1
    del directory
    gc.collect()
    assert not folder.exists()


def test_threads_of_one_process_have_one_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole-file and range reads request the folder under different locks."""
    cache, both, make = ReadCache(None, 1), threading.Barrier(2), tempfile.mkdtemp

    def together(prefix: str) -> str:
        both.wait(600)
        return make(prefix=prefix, dir=tmp_path)

    monkeypatch.setattr("tempfile.mkdtemp", together)
    with ThreadPoolExecutor(2) as threads:
        folders = [threads.submit(cache.open_folder) for _ in range(2)]
        assert folders[0].result() == folders[1].result() == cache.open_folder()


def test_a_relative_cache_stays_where_it_was(memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = RemoteDirectory(memory_url, cache_dir="cache")
    publish(directory, a=b"1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    directory.map("a")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("content", [None, b"12", b"12345"])
def test_a_broken_download_leaves_nothing_and_a_cut_copy_is_made_anew(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    directory = RemoteDirectory(memory_url, cache_dir=tmp_path)
    publish(directory, a=b"1234")

    def broken(self: MemoryFileSystem, remote: str, local: str) -> None:
        Path(local).write_bytes(content or b"1")
        if content is None:
            raise ConnectionError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", broken)
        with pytest.raises(OSError, match=rf"(connection lost|arrived of 4): '{memory_url}/a'"):
            directory.map("a")
    assert list(tmp_path.iterdir()) == []
    assert directory.map("a").view.tobytes() == b"1234"
    (copy,) = tmp_path.iterdir()
    copy.write_bytes(b"12")
    assert directory.map("a").view.tobytes() == b"1234"


def test_a_reader_whose_shard_was_evicted_is_told_to_refresh(memory_url: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, sample_window_size=0) as buffer:
        add_each(buffer, range(2))
        reader = reader_of(memory_url)
        for name in open_directory(memory_url).names("readers"):  # as after a long disconnection
            open_directory(memory_url).remove([name])
        buffer.evict([0])
        with pytest.raises(CorruptStoreError, match=r"shard_\d+.* may have deleted it since .*refresh\(\)"):
            reader.get(0)
        assert reader.refresh()
        assert reader.trajectory_ids.tolist() == [1]
        assert check_trajectory(reader.get(1)) == 1


def test_a_copy_that_does_not_fit_is_fetched_anew(
    memory_url: str, tmp_path: Path, downloads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    filled(memory_url, range(3))
    options = {"cache_dir": tmp_path}

    def read_all() -> list[int]:
        with TrajectoryReplayBuffer.open(memory_url, storage_options=options) as reader:
            return [check_trajectory(reader.get(number)) for number in range(3)]

    assert read_all() == [0, 1, 2]
    shards = sorted(downloads)
    for copy in tmp_path.iterdir():
        flip(copy)
    assert read_all() == [0, 1, 2]
    assert sorted(downloads) == sorted([*shards, *shards])
    assert caplog.text.count("fetched again") == 3
    objects = ObjectStore(memory_url, {})
    damaged = bytearray(objects.read(shards[1]))
    damaged[len(damaged) // 2] ^= 0x10
    objects.put(shards[1], bytes(damaged))
    with pytest.raises(CorruptStoreError, match=r"checksum .*trajectories 1 "):
        read_all()


@pytest.mark.parametrize("range_reads", [False, True])
def test_a_folder_that_takes_no_copies_is_named(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, range_reads: bool
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    filled(memory_url, [1])
    for folder in ("/proc/self/fdinfo", "/proc/self/none"):
        options = {"cache_dir": folder, "range_reads": range_reads}
        with (
            TrajectoryReplayBuffer.open(memory_url, storage_options=options) as reader,
            pytest.raises(ConfigurationError, match=f"cache_dir {folder}: fetched files cannot be stored there"),
        ):
            reader.sample(4)
    gc.collect()
    assert unraisable == []
