"""Remote directories: the suite for every directory, in memory and against a local S3 server, and their own matters."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fsspec
import orjson
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    MissingDependencyError,
    StoreLockedError,
    WriterFencedError,
)
from trajstore.files.answers import ObjectInfo
from trajstore.files.base import Directory, EncodedFile
from trajstore.files.holder import LOCK_NAME, holder_document
from trajstore.files.object_store import ObjectStore
from trajstore.files.opening import open_directory
from trajstore.files.remote import RemoteDirectory
from trajstore.files.remote_leases import RemoteReaderLease
from trajstore.formats.base import ShardContent
from trajstore.store.catalog import Catalog
from trajstore.testing.directory import DirectoryConformance, publish
from trajstore.testing.waiting import wait_until
from trajstore.testing.witness import check_trajectory, witness
from trajstore.trajectory import Trajectory
from trajstore.writing.fencing import fence


@pytest.fixture
def memory_url() -> str:
    return f"memory://bucket-{uuid.uuid4()}/run1"


def around(url: str, **options: Any) -> MutableMapping[str, bytes]:
    """Return what lies at a URL, asked anew each time."""
    system = fsspec.filesystem(url.partition(":")[0], skip_instance_cache=True, use_listings_cache=False, **options)
    return cast(MutableMapping[str, bytes], fsspec.FSMap(system._strip_protocol(url), system))


class TestMemory(DirectoryConformance):
    @pytest.fixture
    def behind(self, memory_url: str) -> MutableMapping[str, bytes]:
        return around(memory_url)

    @pytest.fixture
    def open_again(self, memory_url: str) -> Callable[[], Directory]:
        return lambda: open_directory(memory_url)


class TestS3(DirectoryConformance):
    @pytest.fixture
    def behind(self, s3_url: str, s3_options: dict[str, Any]) -> MutableMapping[str, bytes]:
        return around(s3_url, **s3_options)

    @pytest.fixture
    def open_again(self, s3_url: str, s3_options: dict[str, Any]) -> Callable[[], Directory]:
        return lambda: open_directory(s3_url, **s3_options)


class TestS3WholeBucket(DirectoryConformance):
    @pytest.fixture
    def behind(self, s3_url: str, s3_options: dict[str, Any]) -> MutableMapping[str, bytes]:
        return around(s3_url.removesuffix("/runs/run1"), **s3_options)

    @pytest.fixture
    def open_again(self, s3_url: str, s3_options: dict[str, Any]) -> Callable[[], Directory]:
        return lambda: RemoteDirectory(s3_url.removesuffix("/runs/run1") + "/", **s3_options)


# -- opening and failing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("nosuchscheme://bucket", {}),
        ("memory://bucket", {"lock_ttl": 0}),
        ("memory://bucket", {"lock_ttl": float("nan")}),
        ("memory://bucket", {"cache_bytes": -1}),
        ("memory://bucket", {"lease_ttl": 0}),
        ("memory://bucket", {"range_reads": "yes"}),
    ],
)
def test_wrong_arguments_are_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        open_directory(url, **options)


def test_without_s3fs_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingDependencyError, match=r"trajstore\[s3\]"):
        open_directory("s3a://bucket/run")


def test_failures_of_the_network_are_os_errors_that_name_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    no_retries = {"retries": {"max_attempts": 0}}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        directory = RemoteDirectory(
            "s3://bucket/run", key="x", secret="y", endpoint_url=endpoint, config_kwargs=no_retries
        )
        with pytest.raises(OSError, match=r"s3://bucket/run/metadata\.json"):
            directory.read("metadata.json")
        with pytest.raises(OSError, match="s3://bucket/run/shards/one"):
            directory.publish([EncodedFile("shards/one", [b"x"]), EncodedFile("shards/two", [b"y"])])


def test_absent_bucket(s3_options: dict[str, Any]) -> None:
    directory = RemoteDirectory("s3://there-is-no-such-bucket/run", **s3_options)
    assert not directory.exists()
    assert directory.names() == []
    with pytest.raises(FileNotFoundError, match="there-is-no-such-bucket"):
        publish(directory, a=b"1")


def test_segment_written_twice_with_the_same_content_is_one_commit(memory_url: str) -> None:
    directory = open_directory(memory_url)
    directory.append("log/1", b"line\n")
    directory.append("log/1", b"line\n")  # what a client does whose first answer was lost
    assert directory.read("log/1") == b"line\n"


def _read_in_child(directory: Directory) -> bytes:
    return directory.read("a") + directory.map("a").view.tobytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_processes_connect_anew(method: Any, s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = open_directory(s3_url, **s3_options)
    publish(directory, a=b"1")
    assert _read_in_child(directory) == b"11"
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(_read_in_child, (directory,)).get(timeout=60) == b"11"
    assert _read_in_child(directory) == b"11"


def test_zarr_opens_a_published_shard_in_place(s3_url: str, s3_options: dict[str, Any]) -> None:
    zarr = pytest.importorskip("zarr", reason="needs the extra 'zarr'")
    from trajstore.columns.conversion import flatten
    from trajstore.formats.zarr import ZarrFormat

    rewards = torch.arange(24.0).reshape(4, 2, 3)
    encoded = ZarrFormat(codec="zstd").encode("shard_00000001", ShardContent.of([flatten(Trajectory(rewards=rewards))]))
    open_directory(s3_url, **s3_options).publish(encoded.files)
    group = zarr.open_group(f"{s3_url}/shards/shard_00000001.zarr", mode="r", storage_options=s3_options)
    assert group["rewards"][:].tolist() == rewards.reshape(8, 3).tolist()


# -- whole stores -------------------------------------------------------------------------------------


def trajectory(number: int) -> Trajectory:
    return Trajectory(
        rewards=torch.full((4, 2, 1), float(number)),
        dones=torch.zeros(5, 2, 1, dtype=torch.bool),
        curr_obs={"states": torch.full((4, 2, 3), float(number)), "nothing": torch.zeros(4, 2, 0)},
    )


@pytest.mark.parametrize("backend", ["memory_url", "s3_url"])
@pytest.mark.parametrize(
    ("name", "format_options"),
    [("pt", {}), ("pkl", {}), ("zarr", {}), ("zarr", {"codec": "zstd", "chunk_bytes": 64, "shard_chunks": 2})],
)
def test_a_buffer_lives_in_an_object_store(
    request: pytest.FixtureRequest, backend: str, name: str, format_options: dict[str, Any]
) -> None:
    if name == "zarr":
        pytest.importorskip("zarr", reason="needs the extra 'zarr'")
    url: str = request.getfixturevalue(backend)
    storage_options = request.getfixturevalue("s3_options") if backend == "s3_url" else {}

    def open_buffer() -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=url,
            cache_size=1,
            trajectory_format=name,
            format_options=format_options,
            storage_options=storage_options,
        )

    with open_buffer() as buffer:
        for number in range(4):
            buffer.add_trajectories([trajectory(number)])
            buffer.flush()
        with pytest.raises(StoreLockedError):
            open_buffer()
        buffer.evict([0])
        buffer.save_checkpoint(f"{url}-checkpoint")
    with open_buffer() as buffer:
        assert buffer.add_trajectories([trajectory(4)]) == [4]
        buffer.flush()
        batch = buffer.sample(32)
        assert sorted(set(batch["rewards"].flatten().tolist())) == [1.0, 2.0, 3.0, 4.0]
        assert torch.equal(batch["curr_obs"]["states"], batch["rewards"].expand(32, 3))
        assert batch["curr_obs"]["nothing"].shape == (32, 0)
    loaded = TrajectoryReplayBuffer(storage_options=storage_options)
    loaded.load_checkpoint(f"{url}-checkpoint")
    assert set(loaded.sample(24)["rewards"].flatten().tolist()) <= {1.0, 2.0, 3.0}
    assert len(loaded) == 3
    loaded.close()


# -- the read cache -----------------------------------------------------------------------------------


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of each object that is downloaded."""
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
    for age, name in enumerate("ba"):  # as if b had been used last
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


def test_a_relative_cache_stays_where_it_was(memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = RemoteDirectory(memory_url, cache_dir="cache")
    publish(directory, a=b"1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    directory.map("a")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("content", [None, b"12", b"12345"])
def test_a_broken_download_leaves_nothing(
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


def test_a_damaged_copy_is_made_anew(memory_url: str, tmp_path: Path) -> None:
    directory = RemoteDirectory(memory_url, cache_dir=tmp_path)
    publish(directory, a=b"1234")
    directory.map("a")
    (copy,) = tmp_path.iterdir()
    copy.write_bytes(b"12")
    assert directory.map("a").view.tobytes() == b"1234"


def test_a_reader_whose_shard_was_evicted_is_told_to_refresh(memory_url: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, sample_window_size=0) as buffer:
        for key in range(2):
            buffer.add_trajectories([witness(key)])
            buffer.flush()
        reader = TrajectoryReplayBuffer(sample_window_size=0)
        reader.load_checkpoint(memory_url)
        for name in open_directory(memory_url).names("readers"):  # as if it had been cut off for too long
            open_directory(memory_url).remove([name])
        buffer.evict([0])
        with pytest.raises(CorruptStoreError, match=r"shard_\d+.* may have deleted it since .*refresh\(\)"):
            reader.get(0)
        assert reader.refresh()
        assert reader.trajectory_ids.tolist() == [1]
        assert check_trajectory(reader.get(1)) == 1


# -- the writer's lock --------------------------------------------------------------------------------


def lock_text(**changes: Any) -> bytes:
    return orjson.dumps({**holder_document(), "token": "other", "ttl": 60.0, "heartbeat": time.time(), **changes})


def write_lock(directory: Directory, text: bytes) -> None:
    directory.publish([EncodedFile(LOCK_NAME, [text])])


def dead_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_live_lock_of_another_machine_is_respected(memory_url: str) -> None:
    directory = open_directory(memory_url)
    write_lock(directory, lock_text(host="elsewhere", pid=dead_process()))
    with pytest.raises(StoreLockedError, match=r"on elsewhere since \d{4}-"):
        directory.lock_writer()
    assert b"elsewhere" in directory.read(LOCK_NAME)


def test_lock_without_heartbeat_is_taken_over(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=4)
    write_lock(directory, lock_text(host="elsewhere", heartbeat=time.time() - 61))
    with directory.lock_writer():
        assert b"elsewhere" not in directory.read(LOCK_NAME)
        with pytest.raises(StoreLockedError):
            open_directory(memory_url).lock_writer()
    assert directory.names() == []


def test_lock_of_a_dead_process_of_this_machine_is_taken_over(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=0.2)
    with directory.lock_writer():
        mine = orjson.loads(directory.read(LOCK_NAME))
    write_lock(directory, orjson.dumps({**mine, "token": "other", "ttl": 3600, "pid": dead_process()}))
    directory.lock_writer().release()
    in_another_container = {**mine, "token": "other", "ttl": 3600, "pid": dead_process(), "pid_namespace": 1}
    write_lock(directory, orjson.dumps(in_another_container))
    with pytest.raises(StoreLockedError):
        directory.lock_writer()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"heartbeat": "x", "ttl": 1}', b'{"heartbeat": 0}'])
def test_unreadable_lock_is_left_to_people(memory_url: str, text: bytes) -> None:
    directory = open_directory(memory_url)
    write_lock(directory, text)
    with pytest.raises(StoreLockedError, match=r"another process.*delete writer\.lock"):
        directory.lock_writer()
    assert directory.read(LOCK_NAME) == text


def test_heartbeat_goes_on(s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = RemoteDirectory(s3_url, lock_ttl=6, **s3_options)
    with directory.lock_writer():
        first = orjson.loads(directory.read(LOCK_NAME))["heartbeat"]
        wait_until(lambda: orjson.loads(directory.read(LOCK_NAME))["heartbeat"] > first)
        publish(directory, a=b"1")
        with pytest.raises(StoreLockedError):
            open_directory(s3_url, **s3_options).lock_writer()


def test_writer_that_lost_its_lock_cannot_write(memory_url: str) -> None:
    directory, other = RemoteDirectory(memory_url, lock_ttl=0.1), open_directory(memory_url)
    lock = directory.lock_writer()

    def lost() -> bool:
        write_lock(other, lock_text(host="elsewhere", pid=1))  # again: a heartbeat under way may write over it
        try:
            publish(directory, a=b"1")
        except StoreLockedError:
            return True
        return False

    wait_until(lost)
    for call in (
        lambda: publish(directory, a=b"1"),
        lambda: directory.append("log/1", b"x"),
        lambda: directory.remove(["a"]),
    ):
        with pytest.raises(StoreLockedError, match=r"taken over.*process 1 on elsewhere"):
            call()
    lock.release()
    assert b"elsewhere" in other.read(LOCK_NAME), "the lock of the other writer must stay"


def test_writer_that_cannot_renew_its_lock_pauses(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=0.1)
    lock = directory.lock_writer()

    def unreachable(self: ObjectStore, name: str, start: int = 0) -> bytes:
        raise OSError(5, "unreachable", self.url_of(name))

    def stopped() -> bool:
        try:
            publish(directory, a=b"1")
        except StoreLockedError as error:
            return "could not be renewed" in str(error)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read", unreachable)
        wait_until(stopped)
    wait_until(lambda: not stopped())
    lock.release()
    assert directory.names() == ["a"]
    publish(directory, b=b"2")  # nobody holds it, nobody is refused


def test_one_of_many_gets_the_lock(s3_url: str, s3_options: dict[str, Any]) -> None:
    def take(_: int) -> bool:
        try:
            open_directory(s3_url, **s3_options).lock_writer()
        except StoreLockedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(16))) == 1


# -- writers that others took over from ---------------------------------------------------------------


@pytest.fixture
def s3_url_soon_lost(s3_url: str, s3_options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL of a store and options with which its lock is lost soon."""
    return s3_url, {**s3_options, "lock_ttl": 0.5}


def take_over(url: str, options: dict[str, Any]) -> Directory:
    """Return a directory whose lock was taken from a writer that gives no sign of life."""
    directory = RemoteDirectory(url, **options)

    def taken() -> bool:
        try:
            directory.lock_writer()
        except StoreLockedError:
            return False
        return True

    wait_until(taken)
    return directory


class Frozen:
    """Stops all requests of one directory, as if its process was stopped, until it is thawed."""

    def __init__(self, directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
        self.reached, self.thawed = threading.Event(), threading.Event()
        objects, at_last = directory._objects, at
        for name in ("create", "put", "put_if", "delete", "delete_if", "stamped", "version", "read"):
            monkeypatch.setattr(objects, name, self._stopping(name, getattr(objects, name), at_last))

    def _stopping(self, request: str, real: Callable[..., Any], at: str) -> Callable[..., Any]:
        def call(name: str, *arguments: Any) -> Any:
            if f"{request} {name}".startswith(at):
                self.reached.set()
            if self.reached.is_set():
                assert self.thawed.wait(60)
            return real(name, *arguments)

        return call


@pytest.mark.parametrize(
    ("request_", "change"),
    [
        ("put_if metadata.json", lambda directory: publish(directory, **{"metadata.json": b"late"})),
        ("put_if pins/a", lambda directory: publish(directory, pins__a=b"late")),
        ("version pins/b", lambda directory: publish(directory, pins__b=b"late")),
        ("delete_if pins/a", lambda directory: directory.remove(["pins/a"])),
        ("create log/1", lambda directory: directory.append("log/1", b"late")),
    ],
)
def test_what_a_frozen_writer_was_sending_changes_nothing_of_its_heirs(
    request_: str,
    change: Callable[[Directory], None],
    s3_url_soon_lost: tuple[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = s3_url_soon_lost
    directory = RemoteDirectory(url, **options)
    lock = directory.lock_writer()
    publish(directory, **{"metadata.json": b"1"}, pins__a=b"1")
    frozen = Frozen(directory, monkeypatch, request_)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(change, directory)
        assert frozen.reached.wait(60)
        heir = take_over(url, options)
        publish(heir, **{"metadata.json": b"2"}, pins__a=b"2", pins__b=b"2")
        heir.append("log/1", b"2")
        frozen.thawed.set()
        with pytest.raises(WriterFencedError, match=r"was taken over .* process \d+ on .* write nothing more"):
            late.result(60)
    for name in ("metadata.json", "pins/a", "pins/b", "log/1"):
        assert heir.read(name) == b"2"
    lock.release()
    publish(heir, pins__b=b"3")  # the lock is the heir's still


def test_heirs_replace_what_came_late(s3_url_soon_lost: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url_soon_lost
    with RemoteDirectory(url, **options).lock_writer():
        pass
    heir = take_over(url, options)
    publish(heir, pins__a=b"1")
    publish(RemoteDirectory(url, **options), pins__a=b"late")  # knows of no lock, as what is under way does not
    publish(heir, pins__a=b"2")
    assert heir.read("pins/a") == b"2"


def test_a_released_lock_stays_and_says_so(s3_url: str, s3_options: dict[str, Any]) -> None:
    directory = open_directory(s3_url, **s3_options)
    directory.lock_writer().release()
    assert orjson.loads(directory.read(LOCK_NAME))["released"] is True
    with directory.lock_writer(), pytest.raises(StoreLockedError):
        open_directory(s3_url, **s3_options).lock_writer()


def test_each_writer_has_shard_numbers_of_its_own(memory_url: str) -> None:
    for number in range(3):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as buffer:
            if number != 1:  # also one that commits nothing has taken its numbers
                buffer.add_trajectories([witness(number)])
    names = open_directory(memory_url).names("shards")
    assert names == sorted(f"shards/shard_{block << 32}.pt" for block in (1, 3))


def test_fences_outlive_snapshots(memory_url: str) -> None:
    for number in range(3):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as buffer:
            buffer.add_trajectories([witness(number)])
    directory = open_directory(memory_url)
    fences = Catalog.open(directory).fences
    assert [f"log/{generation:016d}.log" for generation in fences] == directory.names("log")
    assert len(fences) == 3


def test_a_writer_steps_over_the_fence_of_one_that_lost_the_store_while_it_opened_it(memory_url: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url, sample_window_size=0) as buffer:
        for change in (lambda: buffer.add_trajectories([witness(1)]), lambda: buffer.evict([0]), buffer.compact):
            late = Catalog.open(open_directory(memory_url))
            fence(late.directory, late)  # knows of no lock
            buffer.add_trajectories([witness(0)])
            buffer.flush()
            late.refresh()
            fence(late.directory, late)
            change()
    reader = TrajectoryReplayBuffer(sample_window_size=0)
    reader.load_checkpoint(memory_url)
    assert {number: check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()} == {
        1: 1,
        2: 0,
        3: 0,
    }
    reader.close()


def test_a_server_that_keeps_no_conditions_is_told_by_name(
    s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = ObjectStore._put
    monkeypatch.setattr(ObjectStore, "_put", lambda self, name, data, **condition: put(self, name, data))
    with open_directory(s3_url, **s3_options).lock_writer():
        (said,) = [record.getMessage() for record in caplog.records if "If-Match" in record.getMessage()]
    assert "is not kept out when it wakes: it can replace their index, metadata, pins and lock" in said


# -- leases of readers --------------------------------------------------------------------------------


def test_a_reader_keeps_what_it_shows(s3_url: str, s3_options: dict[str, Any]) -> None:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=s3_url, sample_window_size=0, storage_options=s3_options
    ) as buffer:
        for key in range(3):
            buffer.add_trajectories([witness(key)])
            buffer.flush()
        reader = TrajectoryReplayBuffer(sample_window_size=0, storage_options=s3_options)
        reader.load_checkpoint(s3_url)
        buffer.evict([0])
        assert check_trajectory(reader.get(0)) == 0
        assert reader.refresh()
        reader.close()
        buffer.evict([1])
        assert len(open_directory(s3_url, **s3_options).names("shards")) == 1


def test_what_a_lease_says(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url)
    assert directory.announce_reader().release() is None
    assert directory.names() == []  # nobody writes there in place
    directory.append("log/1", b"")
    lease = directory.announce_reader(3)

    def seen() -> tuple[int, bool]:
        (reader,) = directory.readers()
        return reader.generation, reader.settled

    assert seen() == (3, False)
    lease.settle(5)
    assert seen() == (3, False)  # that costs a request, and comes with the next heartbeat
    assert isinstance(lease, RemoteReaderLease)
    lease.beat()
    assert seen() == (5, False)
    lease.beat()
    assert seen() == (5, True)
    lease.look()
    assert seen() == (5, False)
    lease.release()
    lease.release()
    lease.look()
    lease.beat()
    assert directory.readers() == []


def test_leases_end_by_the_clock_of_the_store(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RemoteDirectory(memory_url, lock_ttl=3600, lease_ttl=100)
    directory.append("log/1", b"")
    lease = directory.announce_reader()
    infos = ObjectStore.infos
    passed = 0.0

    def aged(self: ObjectStore, below: str) -> dict[str, ObjectInfo]:
        found = infos(self, below)
        return {name: replace(info, modified=(info.modified or 0) - passed) for name, info in found.items()}

    monkeypatch.setattr(ObjectStore, "infos", aged)
    with directory.lock_writer():  # the last sign of life
        passed = 99.0
        assert len(directory.readers(tidy=True)) == 1
        passed = 102.0
        assert directory.readers() == []
        assert len(directory.names("readers")) == 1
        assert directory.readers(tidy=True) == []
        assert directory.names("readers") == []
    lease.release()


def test_a_reader_that_may_not_write_says_that_it_is_not_announced(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RemoteDirectory(memory_url)
    directory.append("log/1", b"")

    def refused(self: ObjectStore, name: str, data: bytes) -> None:
        raise PermissionError(13, "not allowed", self.url_of(name))

    monkeypatch.setattr(ObjectStore, "put", refused)
    directory.announce_reader().release()
    assert "without an announcement, so its writer may delete shards that this reader shows" in caplog.text


def test_a_dropped_lease_ends_its_heartbeats(memory_url: str) -> None:
    directory = RemoteDirectory(memory_url, lease_ttl=0.03)
    directory.append("log/1", b"")
    lease = directory.announce_reader()
    wait_until(lambda: any("reader-lease" in thread.name for thread in threading.enumerate()))
    del lease
    gc.collect()
    wait_until(lambda: not any("reader-lease" in thread.name for thread in threading.enumerate()))
